"""Check digits and rules of numbers that name a person or an account. Each takes bare digits or capital letters."""

from __future__ import annotations

from datetime import date
from typing import Final

#: Length of an IBAN by country (SWIFT, IBAN Registry, release 99).
IBAN_LENGTHS: Final = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC SM",
        28: "AL AZ BY CY DO GT HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        33: "LC RU",
    }.items()
    for country in countries.split()
}
#: First digits of payment cards, as ranges of four digits, and the lengths in use (ISO/IEC 7812-1).
_CARDS: Final = (
    (4000, 4999, (16, 19)),  # Visa
    (5100, 5599, (16,)),  # Mastercard
    (2221, 2720, (16,)),
    (3400, 3499, (15,)),  # American Express
    (3700, 3799, (15,)),
    (6011, 6011, (16, 19)),  # Discover
    (6440, 6599, (16, 19)),
    (3000, 3059, (14, 16)),  # Diners Club
    (3600, 3699, (14, 16)),
    (3800, 3999, (14, 16)),
    (3528, 3589, (16, 19)),  # JCB
    (6200, 6299, (16, 17, 18, 19)),  # UnionPay
    (2200, 2204, (16,)),  # Mir
    (5000, 5099, (16, 18, 19)),  # Maestro
    (5600, 5899, (16, 18, 19)),
    (6759, 6763, (16, 18, 19)),
)
_DNI: Final = "TRWAGMYFPDXBNJZSQVHLCKE"
_OMOCODIA: Final = str.maketrans("LMNPQRSTUV", "0123456789")
_CF_ODD: Final = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (
            *(1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21),
            *(2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        ),
        strict=True,
    )
)


def luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B: every second digit from the right doubled, the digits' sum divisible by ten."""
    doubled = sum(int(digit) * 2 - 9 * (digit > "4") for digit in digits[-2::-2])
    return (doubled + sum(map(int, digits[::-2]))) % 10 == 0


def card(digits: str) -> bool:
    """A payment card's first digits, length and check digit."""
    first = int(digits[:4])
    known = any(low <= first <= high and len(digits) in lengths for low, high, lengths in _CARDS)
    return known and len(set(digits)) > 1 and luhn(digits)


def iban(value: str) -> bool:
    """ISO 13616: the country's length, and 1 modulo 97 (ISO 7064) with the first four characters at the end."""
    if IBAN_LENGTHS.get(value[:2]) != len(value):
        return False
    return int("".join(str(int(char, 36)) for char in value[4:] + value[:4])) % 97 == 1


def ssn(digits: str) -> bool:
    """US Social Security number: areas, groups and serials that are never given (20 CFR 422.103, and the SSA's page on
    randomization); two were printed in advertisements."""
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    if area in {"000", "666"} or area >= "900" or group == "00" or serial == "0000":
        return False
    return digits not in {"078051120", "219099999", "123456789"}


def dni(value: str) -> bool:
    """ES DNI and NIE, eight digits and a letter, or X, Y, Z, seven digits and a letter: number modulo 23 (Ministerio
    del Interior, "Cálculo del dígito de control del NIF/NIE")."""
    number = value[:-1].replace("X", "0", 1).replace("Y", "1", 1).replace("Z", "2", 1)
    return number.strip("0") != "" and _DNI[int(number) % 23] == value[-1]


def nir(value: str) -> bool:
    """FR numéro de sécurité sociale, 15 characters: sex, year, month, department (2A and 2B in Corsica), at the end 97
    minus the number modulo 97 (INSEE, "NIR")."""
    number = value[:13].replace("2A", "19").replace("2B", "18")
    month = int(value[3:5])
    if value[0] not in "12" or not (1 <= month <= 12 or 20 <= month <= 42 or month >= 50):
        return False
    return 97 - int(number) % 97 == int(value[13:])


def codice_fiscale(value: str) -> bool:
    """IT codice fiscale, 16 characters, also with letters for digits where two people would share one (Decreto
    Ministeriale 12 March 1974, no. 2227)."""
    day = value[9:11].translate(_OMOCODIA)
    if not (day.isdigit() and (1 <= int(day) <= 31 or 41 <= int(day) <= 71)):
        return False
    odd = sum(_CF_ODD[char] for char in value[:15:2])
    even = sum(int(char) if char.isdigit() else ord(char) - 65 for char in value[1:15:2])
    return (odd + even) % 26 == ord(value[15]) - 65


def bsn(digits: str) -> bool:
    """NL burgerservicenummer, nine digits: the "elfproef" with weights 9 to 2 and -1 (Logisch Ontwerp BSN)."""
    total = sum(weight * int(digit) for weight, digit in zip((9, 8, 7, 6, 5, 4, 3, 2, -1), digits, strict=True))
    return digits.strip("0") != "" and total % 11 == 0


def pesel(digits: str) -> bool:
    """PL PESEL, eleven digits: a date of birth whose month tells the century, and a check digit (Ustawa o ewidencji
    ludności, art. 15)."""
    century = {0: 1900, 1: 2000, 2: 2100, 3: 2200, 4: 1800}[int(digits[2]) // 2]
    if not _is_date(century + int(digits[:2]), int(digits[2:4]) % 20, int(digits[4:6])):
        return False
    total = sum(weight * int(digit) for weight, digit in zip((1, 3, 7, 9) * 3, digits[:10], strict=False))
    return (10 - total % 10) % 10 == int(digits[10])


def cpf(digits: str) -> bool:
    """BR CPF, eleven digits: two check digits modulo 11 (Receita Federal, Instrução Normativa 1548/2015)."""
    if len(set(digits)) == 1:
        return False
    for place in (9, 10):
        total = sum(int(digit) * weight for digit, weight in zip(digits, range(place + 1, 1, -1), strict=False))
        if total * 10 % 11 % 10 != int(digits[place]):
            return False
    return True


def steuer_id(digits: str) -> bool:
    """DE Steuer-ID, eleven digits: one of the first ten comes two or three times, the others once; check digit by ISO
    7064, MOD 11,10 (Bundeszentralamt für Steuern, "Prüfzifferberechnung")."""
    counts = sorted(digits[:10].count(digit) for digit in set(digits[:10]))
    if digits[0] == "0" or counts[-1] not in {2, 3} or counts[:-1] != [1] * (len(counts) - 1):
        return False
    product = 10
    for digit in digits[:10]:
        total = (int(digit) + product) % 10 or 10
        product = total * 2 % 11
    return (11 - product) % 10 == int(digits[10])


def nino(value: str) -> bool:
    """UK National Insurance number: prefixes that are not used (HMRC, National Insurance Manual, NIM39110)."""
    return value[0] not in "DFIQUV" and value[1] not in "DFIOQUV" and value[:2] not in _NO_NINO


_NO_NINO: Final = frozenset({"BG", "GB", "KN", "NK", "NT", "TN", "ZZ"})


def _is_date(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def random_looking(value: str) -> bool:
    """At least 3 bits of Shannon entropy a character, and both letters and digits: keys are, words and names are not
    (Sinha et al., Detecting and Mitigating Secret-Key Leaks in Source Code Repositories, MSR 2015).

    In whole numbers, as floats have no place under a digest: n**n >= product(c**c) * 2**(3 n).
    """
    value = value[:64]
    if not any(char.isdigit() for char in value) or not any(char.isalpha() for char in value):
        return False
    product = 1
    for char in set(value):
        count = value.count(char)
        product *= count**count
    power: int = len(value) ** len(value)
    return power >= product << 3 * len(value)
