"""What an answer says: the option, number or time spans that a text means, or that it means none.

Rewards and the checks of a data set read answers with the same functions, so that a ground truth that no reward could
match is refused when it is loaded. Knows nothing about rewards, rows or models.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of options, in order."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"\s*[(\[]?([A-Za-z])\s*[.):\]]\s*")
_LINK = r"(?:\s+(?:is|would be|should be|must be|option|choice|letter))*\W*"
_ANSWER_CUE = re.compile(rf"\banswer{_LINK}", re.IGNORECASE)
_OPTION_CUE = re.compile(rf"\b(?:option|choice|choose|chose|pick|select){_LINK}", re.IGNORECASE)
_AFTER_CUE = 100
"""How far after a cue its letters are looked for (characters)."""

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_UNITS += ["seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: value for value, word in enumerate(_UNITS)} | {word: 10 * (i + 2) for i, word in enumerate(_TENS)}
# Atomic, so that neither a part of a number matches nor a long run of digits takes quadratic time.
_NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?![\d,]|\.\d)", re.IGNORECASE
)
_LAST_EQUALS = re.compile(r"\b(?:answer(?:\s+is)?|equals|result\s+is)\W*", re.IGNORECASE)
_TIME = re.compile(r"\d+(?::[0-5]?\d){1,2}(?:\.\d+)?|\d+(?:\.\d+)?")


def answer_text(response: str) -> str:
    """What a response gives as its answer: the last `<answer>` element, even if it was cut short, else everything."""
    tags = list(_TAG.finditer(response))
    closing = next((place for place in reversed(range(len(tags))) if tags[place].group(1)), None)
    last = len(tags) if closing is None else closing
    opening = next((tag for tag in reversed(tags[:last]) if not tag.group(1)), None)
    if opening is None:
        return response.strip()
    end = len(response) if closing is None else tags[closing].start()
    return response[opening.end() : end].strip()


def plain_words(text: str) -> list[str]:
    """Lower-case words without punctuation; a letter of a script without spaces is a word of its own."""
    folded = unicodedata.normalize("NFKC", text).lower()
    return re.findall(
        r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+", folded
    )


def unlabelled_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options without their own `A.`, `(B)` labels, where every one has the label of its place."""
    labels = [_LABEL.match(option) for option in options]
    in_order = all(match and match.group(1).upper() == LETTERS[i] for i, match in enumerate(labels) if i < 26)
    if options and len(options) <= len(LETTERS) and in_order:
        return tuple(option[match.end() :].strip() for option, match in zip(options, labels, strict=True) if match)
    return tuple(option.strip() for option in options)


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """Letter of the one option that `text` names by its letter or by its words; None where that is none or several.

    `A` before a word in small letters is an article, not an option.
    """
    clean = re.sub(r"\\(?:boxed|text|mathbf|mathrm)", " ", unicodedata.normalize("NFKC", text))
    clean = re.sub(r"[*_`\"'${}~]", " ", clean)
    clean = " ".join(clean.split())
    letters = LETTERS[: len(options)]
    if alone := re.fullmatch(r"\W*([A-Za-z])\W*", clean):
        letter = alone.group(1).upper()
        return letter if letter in letters else None
    named = _letters_in_cues(clean, letters) or _letters_at_start(clean, letters)
    if named:
        return _not_contradicted(named, clean, options)
    return _option_by_words(clean, options)


def _letters_in_cues(clean: str, letters: str) -> set[str]:
    """Letters after the last `the answer is` that has some, `B or C` both; else all after `option` and the like."""
    found = [
        [_enumerated(clean[cue.end() : cue.end() + _AFTER_CUE], letters) for cue in cues.finditer(clean)]
        for cues in (_ANSWER_CUE, _OPTION_CUE)
    ]
    answers = [named for named in found[0] if named]
    return answers[-1] if answers else set().union(*found[1])


def _letters_at_start(clean: str, letters: str) -> set[str]:
    """Letters of `B. Red`, `(B) Red`, `B or C`, `B: Red` and of other labels after them."""
    start = re.match(r"\W*([A-Z])(?=\s*[.):,\]/&]|\s+(?:or|and)\s+[A-Z]\b)", clean) or re.match(
        r"\W*\(([a-zA-Z])\)", clean
    )
    if start is None or start.group(1).upper() not in letters:
        return set()
    rest = clean[start.end() :]
    later = re.findall(r"(?<!\w)([A-Z])(?=[.):,\]]|\s*$|\s+(?:or|and)\b)", rest)
    return {start.group(1).upper(), *(letter for letter in later if letter in letters)}


def _enumerated(text: str, letters: str) -> set[str]:
    """`B`, `(B)`, `b.`, `B or C`, `B, C` at the start of a text."""
    found: set[str] = set()
    while match := re.match(r"\W*([A-Za-z])(?![\w'])", text):
        letter, rest = match.group(1), text[match.end() :]
        ends = re.match(r"\s*(?:$|[^\w\s])", rest) is not None
        joined = re.match(r"\s*(?:or|and|,|/|&)\s*\W*[A-Za-z](?!\w)", rest) is not None
        is_word = letter in "aAI" and not ends and not joined
        if letter.upper() not in letters or is_word or (letter.islower() and not ends and not joined):
            break
        found.add(letter.upper())
        if not joined:
            break
        text = re.sub(r"^\s*(?:or\b|and\b|,|/|&)", "", rest)
    return found


def _not_contradicted(named: set[str], clean: str, options: Sequence[str]) -> str | None:
    """The one named letter, unless what stands beside it is exactly another option's text."""
    if len(named) != 1:
        return None
    letter = next(iter(named))
    beside = plain_words(clean)
    for index, option in enumerate(options):
        words = plain_words(option)
        if LETTERS[index] != letter and words and len(words[0]) > 1 and beside == [letter.lower(), *words]:
            return None
    return letter


def _option_by_words(clean: str, options: Sequence[str]) -> str | None:
    words = plain_words(clean)
    same = [LETTERS[index] for index, option in enumerate(options) if words and plain_words(option) == words]
    labelled = [LETTERS[i] for i, option in enumerate(options) if words == [LETTERS[i].lower(), *plain_words(option)]]
    found = same or labelled
    return found[0] if len(found) == 1 else None


def parse_number(text: str) -> float | None:
    """The one number that `text` states, in digits or words, a unit beside it or not; None where it is none or several.

    `1,000` is a thousand; `3,5` is nobody's number here, so it is None.
    """
    clean = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\\", " ")
    clean = re.sub(r"[*_`$]", " ", clean).strip()
    if lead := list(_LAST_EQUALS.finditer(clean)):
        from_cue = parse_number(clean[lead[-1].end() :]) if lead[-1].end() < len(clean) else None
        if from_cue is not None:
            return from_cue
    values = {float(found.group().replace(",", "")) for found in _NUMBER.finditer(clean)}
    if not values and not any(character.isdigit() for character in clean):
        values = set(_numbers_in_words(clean))
    value = next(iter(values)) if len(values) == 1 else math.nan
    return value if math.isfinite(value) else None


def _numbers_in_words(text: str) -> list[float]:
    """`three`, `twenty-one`, `two hundred and five`: runs of number words."""
    values: list[float] = []
    current: float | None = None
    for word in [*re.findall(r"[a-z]+", text.lower()), ""]:
        if word in _WORDS:
            tens = current is not None and current % 10 == 0 and current % 100 != 0 and _WORDS[word] < 10
            hundreds = current is not None and current % 100 == 0 and current > 0
            if current is not None and not (tens or hundreds):
                values.append(current)
                current = None
            current = (current or 0.0) + _WORDS[word]
        elif word in ("hundred", "thousand") and current is not None:
            current *= 100 if word == "hundred" else 1000
        elif not (word == "and" and current is not None and current >= 100):
            values += [] if current is None else [current]
            current = None
    return values


def parse_spans(text: str) -> tuple[tuple[float, float], ...] | None:
    """Time spans in seconds, from `[1.2, 5.8]`, `12 to 17.5 s`, `00:12 - 00:17`; None where the text holds no pairs."""
    times = [_seconds(found.group()) for found in _TIME.finditer(text)]
    spans = tuple(zip(times[::2], times[1::2], strict=False))
    if not times or len(times) % 2 or any(end < start for start, end in spans):
        return None
    return spans


def spans_text(value: Sequence[object]) -> str:
    """Spans given as a list, `[1.2, 5.8]` or `[[1.2, 5.8], [7, 9]]`, as the text that `parse_spans` reads."""
    return json.dumps(value)


def _seconds(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total
