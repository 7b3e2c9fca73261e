"""What the card says of personal data: how many values of each kind, and how well the detectors find. Never a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from curation.pii.hits import KINDS
from curation.pii.planted import measure
from curation.plots import Bar, bars

NAMES: Final = {
    "secret": "keys, tokens, passwords",
    "iban": "IBANs",
    "card": "payment cards",
    "national_id": "national ids",
    "email": "e-mail addresses",
    "ip": "addresses of hosts",
    "phone": "phone numbers",
}


def facts(rules: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Plain values for the card.

    :param rules: `pii` of the manifest's rules. :param counts: what the stage counted.
    :returns: by kind the values found, and precision and recall in thousandths over the planted set.
    """
    kinds = tuple(kind for kind in KINDS if kind in rules["kinds"])
    measured = measure(kinds)
    return {
        "rows": counts.get("pii_rows", 0),
        "names": counts.get("masked", 0),
        "found": {kind: counts.get(f"pii_{kind}", 0) for kind in kinds},
        "planted": {
            kind: {"values": found.planted, "precision": found.precision, "recall": found.recall}
            for kind, found in measured.items()
        },
    }


def section(card: Mapping[str, Any]) -> str:
    """The section's body, or nothing if nothing was looked for."""
    found = card.get("pii")
    if found is None:
        return ""
    counts = [
        Bar(NAMES[kind], [("--near", number, f"{number:,}")], f"{number:,}") for kind, number in found["found"].items()
    ]
    action = "masked in" if card["rules"]["pii"]["action"] == "mask" else "found in, and dropped with,"
    rows = "".join(
        f"<tr><td>{NAMES[kind]}</td><td class=n>{item['values']:,}</td><td class=n>{item['precision'] / 10:.1f}%</td>"
        f"<td class=n>{item['recall'] / 10:.1f}%</td></tr>"
        for kind, item in found["planted"].items()
    )
    return (
        f"<p>{sum(found['found'].values()):,} values {action} {found['rows']:,} rows, thoughts and calls included; the"
        f" label, source, group, tools or kept columns of {found['names']:,} rows have a mask. Names, streets and what"
        " people say of themselves in words are not looked for.</p>"
        f"<figure>{bars(counts, 'personal data by kind')}</figure>"
        "<h3>How well they are found</h3><p>Measured with these settings on a generated set that has values planted,"
        " and numbers, versions and hashes that only look like some. Real text has other forms.</p>"
        '<div class="scroll"><table><thead><tr><th>kind</th><th class=n>planted</th><th class=n>precision</th>'
        f"<th class=n>recall</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
