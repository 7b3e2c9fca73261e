"""How well the detectors find: a generated text in which it is known what is planted, and what only looks like it.

Values have the right form and check digits and belong to nobody; a part of them stands as people also write them and no
rule finds, and a part of what only looks like them has the right check digit by chance. Nothing here was written to be
found: the figures are of this set, and say nothing of names, streets or what a person describes in words.
"""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Final, NamedTuple

from curation.pii import checks
from curation.pii.hits import KINDS
from curation.pii.stage import find

_WORDS: Final = [
    "the", "customer", "asked", "whether", "a", "parcel", "could", "be", "sent", "again", "because", "it", "had",
    "been", "left", "with", "somebody", "who", "moved", "away", "and", "nobody", "at", "that", "desk", "knew",
    "when", "her", "order", "would", "come", "so", "we", "looked", "into", "our", "records", "found", "both",
    "entries", "wrote", "back",
]  # fmt: skip
_NAMES: Final = [
    "anna", "ben", "carla", "david", "elif", "farid", "grace", "hugo", "ines", "jan", "kofi", "lena", "marco",
    "nadia", "oleg", "priya", "quinn", "rosa",
]  # fmt: skip
_HOSTS: Final = ["mailbox", "post-haus", "northwind", "correo", "kontor", "studio-nine", "acme", "lakeside"]
_TLDS: Final = ["com", "org", "net", "de", "fr", "es", "co.uk", "com.br", "it", "nl", "pl", "io"]

Maker = Callable[[Random], str]


class Planted(NamedTuple):
    """A text with at most one value, characters [start, end); `kind` is None where it only looks like one."""

    text: str
    start: int
    end: int
    kind: str | None


class Figures(NamedTuple):
    """Of one kind; precision and recall are in thousandths.

    :param found: planted values that a hit of their kind covers whole.
    :param hits: all of that kind, of which `right` touch a planted one.
    """

    planted: int
    found: int
    hits: int
    right: int

    @property
    def precision(self) -> int:
        return self.right * 1000 // self.hits if self.hits else 1000

    @property
    def recall(self) -> int:
        return self.found * 1000 // self.planted if self.planted else 1000


@lru_cache(maxsize=4)
def measure(kinds: tuple[str, ...] = KINDS, each: int = 100, seed: int = 20) -> dict[str, Figures]:
    """Figures by kind. :param each: values of a kind, and of each sort of what only looks like one."""
    totals = {kind: [0, 0, 0, 0] for kind in kinds}
    for planted in plant(each, seed):
        hits = find(planted.text, kinds)
        if planted.kind in totals:
            total = totals[planted.kind]
            total[0] += 1
            total[1] += any(
                hit.kind == planted.kind and hit.start <= planted.start and hit.end >= planted.end for hit in hits
            )
        for hit in hits:
            totals[hit.kind][2] += 1
            totals[hit.kind][3] += (
                hit.kind == planted.kind and hit.start < planted.end and planted.start < hit.end
            )  # fmt: skip
    return {kind: Figures(*total) for kind, total in totals.items()}


def plant(each: int, seed: int) -> list[Planted]:
    """The set: `each` texts of every kind and of every near miss; the same for the same seed."""
    rng = Random(seed)  # noqa: S311 - nothing here is to be unguessable
    made = [
        _planted(rng, kind, makers[index % len(makers)]) for kind, makers in VALUES.items() for index in range(each)
    ]
    return made + [_planted(rng, None, maker) for maker in NEAR_MISSES for _ in range(each)]


def _planted(rng: Random, kind: str | None, maker: Maker) -> Planted:
    """The value is what `_in` marks, or all that is made."""
    made = maker(rng)
    lead, value, rest = ("", made, "") if "\x01" not in made else made.split("\x01")
    before = " ".join(rng.choices(_WORDS, k=rng.randint(4, 12)))
    after = " ".join(rng.choices(_WORDS, k=rng.randint(3, 9)))
    join = rng.choice([" ", "\n", ": ", " (", ' "'])
    close = {" (": ")", ' "': '"'}.get(join, rng.choice(["", ".", ","]))
    text = f"{before}{join}{lead}"
    return Planted(f"{text}{value}{rest}{close} {after}.", len(text), len(text) + len(value), kind)


def _in(lead: str, value: str, rest: str = "") -> str:
    """A value with what stands before and behind it."""
    return f"{lead}\x01{value}\x01{rest}"


def _digits(rng: Random, count: int) -> str:
    return "".join(rng.choices(string.digits, k=count))


def _chars(rng: Random, count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(rng.choices(alphabet, k=count))


def _until(rng: Random, make: Maker, check: Callable[[str], bool]) -> str:
    """A value that passes: the last characters are drawn until it does."""
    while not check(value := make(rng)):
        pass
    return value


def _email(rng: Random) -> str:
    name = rng.choice(_NAMES)
    local = rng.choice(
        [name, f"{name}.{rng.choice(_NAMES)}", f"{name}{rng.randint(1, 99)}", f"{name}+{rng.choice(_NAMES)}"]
    )
    found = f"{local}@{rng.choice(_HOSTS)}.{rng.choice(_TLDS)}"
    return rng.choice([found, found.title(), found.upper(), found])


def _card_digits(rng: Random) -> str:
    first, length = rng.choice(
        [("4", 16), ("53", 16), ("2300", 16), ("37", 15), ("6011", 16), ("36", 14), ("3530", 16)]
    )
    return _until(rng, lambda rng: first + _digits(rng, length - len(first)), checks.card)


def _grouped(digits: str, *lengths: int, sep: str = " ") -> str:
    parts, at = [], 0
    for length in lengths:
        parts.append(digits[at : at + length])
        at += length
    return sep.join(parts)


def _card_groups(rng: Random) -> str:
    digits = _card_digits(rng)
    lengths = {16: (4, 4, 4, 4), 15: (4, 6, 5), 14: (4, 6, 4)}[len(digits)]
    return _grouped(digits, *lengths, sep=rng.choice(" -"))


def _iban(rng: Random) -> str:
    country = rng.choice(["DE", "FR", "GB", "ES", "NL", "PL", "IT", "BE", "PT", "AT"])
    rest = checks.IBAN_LENGTHS[country] - 4
    letters = {"GB": 4, "NL": 4, "IT": 1}.get(country, 0)
    body = _chars(rng, letters, string.ascii_uppercase) + _digits(rng, rest - letters)
    number = int("".join(str(int(char, 36)) for char in f"{body}{country}00"))
    return f"{country}{98 - number % 97:02}{body}"


def _iban_groups(rng: Random) -> str:
    value = _iban(rng)
    return " ".join(value[at : at + 4] for at in range(0, len(value), 4))


def _ssn(rng: Random) -> str:
    return _until(rng, lambda rng: _digits(rng, 9), checks.ssn)


def _dni(rng: Random) -> str:
    first = rng.choice([_digits(rng, 1), "X", "Y", "Z"])
    return _until(rng, lambda rng: f"{first}{_digits(rng, 7)}{rng.choice(string.ascii_uppercase)}", checks.dni)


def _nir(rng: Random) -> str:
    def make(rng: Random) -> str:
        born = f"{_digits(rng, 2)}{rng.randint(1, 12):02}"
        return f"{rng.choice('12')}{born}{rng.choice(['75', '2A', '2B', '69'])}{_digits(rng, 8)}"

    return _until(rng, make, checks.nir)


def _codice_fiscale(rng: Random) -> str:
    letters = string.ascii_uppercase

    def make(rng: Random) -> str:
        day = rng.choice([0, 40]) + rng.randint(1, 28)
        head = (
            f"{_chars(rng, 6, letters)}{_digits(rng, 2)}{rng.choice('ABCDEHLMPRST')}{day:02}{rng.choice('ABCDEFGHIL')}"
        )
        return f"{head}{_digits(rng, 3)}{rng.choice(letters)}"

    return _until(rng, make, checks.codice_fiscale)


def _pesel(rng: Random) -> str:
    def make(rng: Random) -> str:
        return f"{_digits(rng, 2)}{rng.randint(1, 12):02}{rng.randint(1, 28):02}{_digits(rng, 5)}"

    return _until(rng, make, checks.pesel)


def _nino(rng: Random) -> str:
    letters = "ABCEGHJKLMNPRSTWXYZ"

    def make(rng: Random) -> str:
        return f"{_chars(rng, 2, letters)}{_digits(rng, 6)}{rng.choice('ABCD')}"

    value = _until(rng, make, checks.nino)
    return rng.choice([value, _grouped(value, 2, 2, 2, 2, 1)])


def _steuer_id(rng: Random) -> str:
    def make(rng: Random) -> str:
        nine = rng.sample(string.digits, 9)
        ten = [*nine, rng.choice(nine)]
        rng.shuffle(ten)
        return "".join(ten) + _digits(rng, 1)

    value = _until(rng, make, checks.steuer_id)
    return rng.choice([value, _grouped(value, 2, 3, 3, 3)])


def _cpf(rng: Random) -> str:
    value = _until(rng, lambda rng: _digits(rng, 11), checks.cpf)
    return rng.choice([value, f"{_grouped(value[:9], 3, 3, 3, sep='.')}-{value[9:]}"])


def _bsn(rng: Random) -> str:
    return _until(rng, lambda rng: _digits(rng, 9), checks.bsn)


def _ipv4(rng: Random) -> str:
    first = rng.choice([23, 45, 52, 81, 93, 104, 151, 185, 212])
    return f"{first}.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(1, 254)}"


def _ipv6(rng: Random) -> str:
    parts = [f"{rng.randint(0x2400, 0x2FFF):x}", *(f"{rng.randint(0, 0xFFFF):x}" for _ in range(rng.choice([2, 7])))]
    return ":".join(parts) if len(parts) == 8 else f"{':'.join(parts)}::{rng.randint(1, 255):x}"


def _nanp(rng: Random) -> tuple[str, str, str]:
    return f"{rng.randint(2, 9)}0{rng.randint(2, 9)}", f"{rng.randint(2, 9)}{rng.randint(2, 9)}0", _digits(rng, 4)


def _abroad(rng: Random) -> str:
    code, lengths = rng.choice(
        [
            ("33", (1, 2, 2, 2, 2)),
            ("49", (3, 7)),
            ("44", (2, 4, 4)),
            ("34", (3, 3, 3)),
            ("48", (3, 3, 3)),
            ("81", (2, 4, 4)),
        ]
    )
    rest = str(rng.randint(1, 9)) + _digits(rng, sum(lengths) - 1)
    return rng.choice([f"+{code} {_grouped(rest, *lengths)}", f"+{code}{rest}", f"00{code} {_grouped(rest, *lengths)}"])


def _at_home(rng: Random) -> str:
    return rng.choice(
        [
            _grouped("0" + str(rng.randint(1, 9)) + _digits(rng, 8), 2, 2, 2, 2, 2, sep=rng.choice(" .")),
            f"020 {_digits(rng, 4)} {_digits(rng, 4)}",
            f"0171 {_digits(rng, 7)}",
            f"6{_digits(rng, 2)} {_digits(rng, 2)} {_digits(rng, 2)} {_digits(rng, 2)}",
            f"(11) 9{_digits(rng, 4)}-{_digits(rng, 4)}",
        ]
    )


def _token(rng: Random) -> str:
    make: dict[str, int] = {"gh" + "p_": 36, "AK" + "IA": 16, "glp" + "at-": 20, "xox" + "b-": 40, "sk_" + "live_": 24}
    make |= {"AI" + "za": 35, "sk-" + "proj-": 48, "sk-" + "ant-": 60, "h" + "f_": 34}
    lead, length = rng.choice(sorted(make.items()))
    alphabet = {"AKIA": string.ascii_uppercase + "234567", "hf_": string.ascii_letters}.get(lead)
    return lead + (_chars(rng, length, alphabet) if alphabet else _chars(rng, length))


def _jwt(rng: Random) -> str:
    parts = [json.dumps({"alg": "HS256", "typ": "JWT"}), json.dumps({"sub": _digits(rng, 8)})]
    coded = [base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts]
    return f"{coded[0]}.{coded[1]}.{_chars(rng, 43)}"


def _pem(rng: Random) -> str:
    name = rng.choice(["", "RSA ", "EC ", "OPENSSH "]) + "PRIVATE" + " KEY-----"
    lines = "\n".join(_chars(rng, 64) for _ in range(rng.randint(3, 12)))
    return f"-----BEGIN {name}\n{lines}\n-----END {name}"


def _hex(count: int) -> Maker:
    return lambda rng: _chars(rng, count, "0123456789abcdef")


#: By kind, each in turn. Those with a remark are written so that no rule finds them.
VALUES: Final[dict[str, tuple[Maker, ...]]] = {
    "email": (_email,),
    "phone": (
        _abroad,
        _at_home,
        lambda rng: "-".join(_nanp(rng)),
        lambda rng: "({}) {}-{}".format(*_nanp(rng)),
        lambda rng: "+1 {}.{}.{}".format(*_nanp(rng)),
        lambda rng: _in("phone: ", "".join(_nanp(rng))),
        _abroad,
        _at_home,
        lambda rng: "-".join(_nanp(rng)),
        lambda rng: "".join(_nanp(rng)),  # nothing tells it from an order number
    ),
    "ip": (_ipv4, _ipv6, lambda rng: _in("http://", _ipv4(rng), ":8080/"), _ipv4),
    "card": (_card_digits, _card_groups),
    "iban": (_iban, _iban_groups, lambda rng: _in("IBAN ", _iban_groups(rng))),
    "national_id": (
        lambda rng: _grouped(_ssn(rng), 3, 2, 4, sep="-"),
        lambda rng: _in("SSN ", _ssn(rng)),
        _dni,
        _nir,
        _codice_fiscale,
        _pesel,
        _nino,
        _steuer_id,
        _cpf,
        lambda rng: _in("BSN: ", _bsn(rng)),
        _dni,
        _codice_fiscale,
        _nir,
        _bsn,  # one number of nine digits in eleven passes its check
    ),
    "secret": (
        _token,
        _jwt,
        _pem,
        lambda rng: _in("postgres://", f"{rng.choice(_NAMES)}:{_chars(rng, 12)}", "@db.internal/app"),
        lambda rng: _in("api_key = '", _chars(rng, 24), "'"),
        lambda rng: _in("aws_secret" + "_access_key=", _chars(rng, 40)),
        lambda rng: _in('"password": "', _chars(rng, 14), '"'),
        lambda rng: _in("my password is ", f"{rng.choice(_NAMES)}{rng.randint(10, 99)}"),  # said in words
        _token,
        _pem,
    ),
}

#: What only looks like one.
NEAR_MISSES: Final[tuple[Maker, ...]] = (
    lambda rng: f"order {_digits(rng, rng.randint(7, 16))}",
    lambda rng: f"#{_digits(rng, rng.randint(8, 11))}",
    lambda rng: f"v{rng.randint(1, 20)}.{rng.randint(0, 40)}.{rng.randint(0, 90)}.{rng.randint(0, 200)}",
    lambda rng: f"version {rng.randint(1, 30)}.{rng.randint(0, 9)}.{rng.randint(0, 99)}",
    _hex(32),
    _hex(40),
    lambda rng: "-".join(_hex(count)(rng) for count in (8, 4, 4, 4, 12)),
    lambda rng: f"ISBN 978-{rng.randint(0, 9)}-{_digits(rng, 3)}-{_digits(rng, 5)}-{_digits(rng, 1)}",
    lambda rng: f"ISBN 978{_digits(rng, 10)}",
    lambda rng: f"20{_digits(rng, 2)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02} 1{_digits(rng, 1)}:30",
    lambda rng: f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.20{_digits(rng, 2)}",
    lambda rng: f"{rng.randint(-90, 90)}.{_digits(rng, 6)}, {rng.randint(-180, 180)}.{_digits(rng, 6)}",
    lambda rng: f"{rng.choice(['10.0', '192.168', '172.16', '127.0'])}.{rng.randint(0, 255)}.{rng.randint(1, 254)}",
    lambda rng: f"2001:db8::{_hex(4)(rng)}",
    lambda rng: ":".join(_hex(2)(rng) for _ in range(6)),
    lambda rng: f"{rng.randint(1, 999)} {_digits(rng, 3)} {_digits(rng, 3)} inhabitants",
    lambda rng: f"{rng.randint(1, 999)}.{_digits(rng, 3)}.{_digits(rng, 3)},{_digits(rng, 2)}",
    lambda rng: f"icon-{_digits(rng, 2)}@2x.png",
    lambda rng: f"@{rng.choice(_NAMES)}.{rng.choice(_NAMES)}",
    lambda rng: f"17{_digits(rng, 8)}",  # seconds since 1970
    lambda rng: f"17{_digits(rng, 11)}",
    lambda rng: f"{_chars(rng, 3, string.ascii_uppercase)}{_digits(rng, 9)}",  # a parcel
    lambda rng: f"token = get_{rng.choice(_NAMES)}_token()",
    lambda rng: f'password = "your_{rng.choice(_NAMES)}_here"',
    lambda rng: f"https://docs.northwind.com/a:b/{rng.choice(_NAMES)}@v2",
    lambda rng: f"sk-{'-'.join(rng.choices(_WORDS, k=6))}",
)
