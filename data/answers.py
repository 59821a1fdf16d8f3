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
_THINK = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_THINK_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_LABEL = re.compile(r"\s*[(\[]?([A-Za-z])\s*[.):\]]\s*")

# Choices are read from a text in which every option that is named, by letter or by words, is marked as \u27e8B\u27e9.
_PLAIN = [
    (r"\\(?:text|math)[a-z]*|[\u2018\u201c\u201d]", " "),
    (r"\\f?boxed", " answer is "),
    (r"<(b|i|u|em|strong|p|span)>([^<]*)</\1>", r" \2 "),
    (r"(?<=\w)['\u2019](?=\w)", ""),
    (r"[*_`\"'${}~\\#]", " "),
    (r"\u2212", "-"),
    (r"[^\S\n]+", " "),
    (r" ?\n\s*", "\n"),
    (r"\b(?:no|without|without a|beyond) (?:doubt|question)\b", " "),
]
"""Pattern and what stands for it before options are looked for."""
_ANSWER = (
    r"(?:\b(?:answer|ans|solution|conclusion|(?:correct|right|final|best) (?:option|choice|one|letter))\b|答案|正解)"
)
"""What comes before the verdict; the last one counts."""
_NAMING = (
    r"(?:\b(?:option|choice|choose|chose|pick|select|go(?:ing)? with|its|(?:it|this|that) is|wait"
    r"|actually|maybe|perhaps|possibly|(?:could|might|may)(?: also)? be)\b|选择?|選)"
)
"""What comes before an option, in any letter case or in words."""
_HINT = (
    r"\b(?:is|be|therefore|thus|hence|so|think|believe|guess|say|probably|likely|clearly|definitely"
    r"|correct|right|final|result|response|looks like|but|yes|letter|chosen|picked|selected)\b"
)
"""What comes before an option that is a capital letter."""
_LINK = (
    r"[^\w\u27e8]*(?:\b(?:the|an?|is|be|would|should|must|option|choice|letter|most|likely|probably|definitely"
    r"|clearly|then|either|both|to|question|here|my|final)\b[^\w\u27e8]*)*"
)
_CLAUSE_ENDS = r"\s*(?:$|[^\w\s-](?!\w)|(?:because|since|or|and|not|but)\b)"
_BRACKETED = re.compile(r"(?<![A-Za-z0-9])[(\[<\u3010\u300c\u27e8]\s*([A-Za-z])\s*\.?[)\]>\u3011\u300d\u27e9]")
_FIRST = re.compile(
    r"\W*(?<![\w\u27e8])([a-z])"
    r"(?=\s*[.):\],](?!\w)|\W*$| (?:or|and|not|because|is(?: the)? (?:correct|right|answer))\b)"
)
_WORDS_OF = r"\u27ea(?P<words>[A-Z])\d+\u27eb"
_WORDS_ALONE = re.compile(rf"\W*?{_WORDS_OF}\W*")
_WORDS_AFTER_CUE = re.compile(
    rf"((?i:{_ANSWER}(?: [a-z]+){{0,6}}? ?(?:\bis\b|\bbe\b|[:=是为])|{_NAMING}|\A)[^\w\u27e8\u27ea-]*)"
    rf"{_WORDS_OF}(?={_CLAUSE_ENDS})"
)
_LETTER_THEN_WORDS = re.compile(
    r"\u27e8(?P<letter>.)\u27e9[\s.):\]\-\u2013\u2014,=(]*(?:(?i:or|and|maybe|perhaps|also|possibly)\s+)*"
    rf"{_WORDS_OF}\)?"
)
_WORDS_THEN_LETTER = re.compile(rf"{_WORDS_OF}[\s.:,=-]*\u27e8(?P<letter>.)\u27e9")
_FOLLOWS_CUE = re.compile(rf"((?i:{_ANSWER}|{_NAMING}){_LINK})(?<![A-Za-z0-9])([a-z])(?![A-Za-z0-9])(?={_CLAUSE_ENDS})")
_JOINED = re.compile(r"(\u27e9(?:,|/|&|\s|\b(?:or|and|nor)\b)+)(?<![a-z])([a-z])(?![A-Za-z0-9]|\s+\w)")
_AFTER_A = r"(?:or|and|nor|but|not|is|was|isnt|would|could|cannot|seems|because|since|over|rather|instead)\b"
_CAPITAL = re.compile(
    r"(?<![A-Za-z0-9\u27e8\u27ea])(?<![A-Za-z]-)(?<!\b[A-Z]\.)([A-Z])(?![A-Za-z0-9+\u27e9]|-[A-Za-z]|\.[A-Z]\b)"
    rf"(?:(?<![AI])|(?! (?!{_AFTER_A})\w))"
)
_MENTION = re.compile("\u27e8(.)\u27e9")

_REASON = re.compile(r"\b(?:because|since)\b(?>(?:(?!answer)[^.;!?,\n])*)", re.IGNORECASE)
_EXPLANATION = re.compile(
    r"\b(?:explanation|reason|reasoning|rationale|justification)\s*(?::|\bis\b).*", re.IGNORECASE | re.DOTALL
)
_ALTERNATIVE = re.compile(
    r"\b(?:or|also|maybe|perhaps|possibly|could|might|may)(?:\W+(?:be|option))*\W*\u27e8.\u27e9", re.IGNORECASE
)
_NOT_JUDGED = (
    r"(?!\s*(?:(?:thats|its|(?:that|this|it) is) )?(?:wrong|incorrect|false|(?:not|isnt) (?:correct|right|it|the))\b)"
)
_IN_LIST = (
    r"\s*(?:(?:or|and|nor) )?(?:(?:option|choice) )?\u27e8.\u27e9(?! (?:is|was|isnt|cannot|would|could|might|may)\b)"
)
_CLAUSE_END = re.compile(
    rf"(?:[.;!?\n]| [-\u2013\u2014]+ |(?<!\u27e9),|(?<=\u27e9),(?!{_IN_LIST})|(?<!\u27e9)(?<!not):){_NOT_JUDGED}"
    rf"|\b(?:but|however|whereas|while|although|though|so|then|therefore|thus|hence|which)\b"
    rf"|(?<!\u27e9) (?:and|or)\b|\b(?:and|or)\b(?!{_IN_LIST})",
    re.IGNORECASE,
)
_DENIAL = re.compile(
    r"\b(?:not(?! (?:only|just|merely))|never|cannot|(?:is|are|was|were|do|does|did|could|would|should|wo|ca)nt"
    r"|wrong|incorrect|false|untrue|invalid|impossible|unlikely|doubt|disagree|eliminated|excluded|ruled out|rejected"
    r"|discarded|dismissed)\b|不|非|错"
    r"|\b(?P<ahead>no|none|nor|neither|instead of|than|over|unlike|except|without|eliminat(?:e|ing)|exclud(?:e|ing)"
    r"|rul(?:e|ing) out|reject(?:ing)?|discard(?:ing)?)\b",
    re.IGNORECASE,
)
"""What denies the options after it in its clause or, unless it is `ahead`, before it if none follow."""
_CONFIRMS = re.compile(
    r"\s*(?:(?:is|seems|looks|(?:must|would|should|has to) be) (?:(?:the|most|more|clearly|definitely|probably|my"
    r"|final|indeed|only) )*(?:correct|right(?! of)|true|answer|best|likely|accurate|one|choice|option|solution)\b"
    r"|(?:fits|matches)\b|is\W*$|是?(?:正确|对))",
    re.IGNORECASE,
)
_LEADS_TO = re.compile(rf"(?i:{_ANSWER}|{_NAMING}|{_HINT}){_LINK}(?=\u27e8)")
_VERDICT = re.compile(rf"(?i:{_ANSWER})[^.;!?\u27e8]{{0,60}}(?=\u27e8)")
_OPENING = re.compile(r"\W*(?:\d+[.)]\s*)?(?:both|either|yes|ok)?\W*", re.IGNORECASE)
_LABEL_ENDS = re.compile(
    r"\s*$|\s*[^\w\s]|\n| (?:or|and|nor|because|since|not|but|rather|instead|over)\b", re.IGNORECASE
)

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
_SCALES = {"dozen": 12.0, "hundred": 1e2, "thousand": 1e3, "k": 1e3, "million": 1e6, "billion": 1e9}
# Atomic, so that neither a part of a number matches nor a long run of digits takes quadratic time.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.,])[-+]?(?>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?!\d|,\d|\.\d)",
    re.IGNORECASE,
)
_PIECE = re.compile(rf"{_NUMBER.pattern}|[a-z]+|[^\s\w-]", re.IGNORECASE)
_NUMBER_CUE = re.compile(r"\b(?:answer(?:\s+is)?|equals|result\s+is)[\s:=(\[\"]*", re.IGNORECASE)
_DENIED = re.compile(
    rf"(?:{_NUMBER.pattern}\s+(?:is|are|was|were)\s+)?"
    r"\b(?:not|never|neither|nor|cannot|[a-z]+n['\u2019]t|at\s+least|at\s+most|up\s+to|instead\s+of"
    r"|(?:more|less|fewer|greater|smaller|other|rather)\s+than)\b"
    r"(?>(?:(?!\bbut\b|[.,;!?](?!\d)).)*)",
    re.IGNORECASE | re.DOTALL,
)
"""What is said not to be, or only bounded, up to the end of its clause."""
_TANGLED = re.compile(
    rf"#\s*[-+/:^~x\u2044\u00d7]\s*#|#[a-z]+\d|(?<![\w#])-\s+(?:#|(?:{'|'.join(_WORDS)})\b)|(?<![a-z\d])\d",
    re.IGNORECASE,
)
"""Among numbers written `#`: `1/2`, `3-4`, `1m80`, `3,5` are not one number, and `- 3` may be an item of a list."""
_REWRITTEN = [
    (r"(?<=m)\^?[23\u00b2\u00b3](?!\w)", ""),  # square metres
    (r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070-\u2079\u00bc-\u00be\u2150-\u215e])", "^"),  # or 3 1/2 would turn into 31/2
    (r"[\u2212\u2013]", "-"),
    (r"[*_`$#\\]", " "),
    (r"\b(?:minus|negative)\s+(?=[\d.])", "-"),
    (r"(?<!\w)-(?=[a-z])", "minus "),
    (r"\b(?:no|this|that|the|which|each|every|another)\s+one\b", " "),
    (r"\band\s+a\s+half\b", "plushalf"),
    (rf"(?<!half )\ban?\s+(?={'|'.join(_SCALES)})", "one "),
]
"""Pattern and what stands for it before numbers are read."""
_TIME = re.compile(r"\d+(?::[0-5]?\d){1,2}(?:\.\d+)?|\d+(?:\.\d+)?")


def answer_text(response: str) -> str:
    """What a response gives as its answer: the last `<answer>` element, even if it was cut short, else everything.

    What stands in `<think>` elements is not given.
    """
    response = _without_thinking(response)
    tags = list(_TAG.finditer(response))
    closing = next((place for place in reversed(range(len(tags))) if tags[place].group(1)), None)
    last = len(tags) if closing is None else closing
    opening = next((tag for tag in reversed(tags[:last]) if not tag.group(1)), None)
    start = 0 if opening is None else opening.end()
    end = len(response) if closing is None else tags[closing].start()
    return response[start:end].strip()


def _without_thinking(response: str) -> str:
    """Without `<think>` elements: one without a start began in the prompt, one without an end was cut short."""
    *closed, rest = _THINK_END.split(response)
    parts = [_THINK.split(part, maxsplit=1) for part in closed]
    said, *thought = _THINK.split(rest, maxsplit=1)
    answered = _TAG.search(thought[0]) if thought else None
    tail = thought[0][answered.start() :] if answered else ""
    return " ".join([*(part[0] for part in parts if len(part) == 2), said, tail])


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
    """Letter of the one option that `text` settles on by letter or by words; None where that is none or several.

    What is denied, or only a reason, does not count. `A` before a word in small letters is an article.
    """
    clean = unicodedata.normalize("NFKC", text)
    for pattern, instead in _PLAIN:
        clean = re.sub(pattern, instead, clean, flags=re.IGNORECASE)
    clean = clean.strip()
    if alone := re.fullmatch(r"\W*([A-Za-z])(?!\+)\W*", clean):
        named = {alone.group(1).upper()}
    else:
        named = _options_named(clean, options)
    letter = next(iter(named)) if len(named) == 1 else ""
    return letter if letter and letter in LETTERS[: len(options)] else None


def _options_named(clean: str, options: Sequence[str]) -> set[str]:
    words: list[str] = []

    def token(found: re.Match[str]) -> str:
        words.append(found.group())
        return f"\u27ea{found.lastgroup}{len(words) - 1}\u27eb"

    text = re.sub(_wordings(options), token, re.sub("[\u27ea\u27eb]", " ", clean))
    if alone := _WORDS_ALONE.fullmatch(text):
        return {alone.group("words")}
    marked = re.sub(r"\u27ea[A-Z](\d+)\u27eb", lambda found: words[int(found.group(1))], _marked(text, len(options)))
    return _settled(_without_reasons(marked))


def _wordings(options: Sequence[str]) -> str:
    """Pattern of any option's words, an article before them or not; the group that matched is its letter."""
    spoken = [("-" if re.match(r"\s*[-\u2212]\s*\d", option) else "", *plain_words(option)) for option in options]
    bare = [
        (sign, *(words[1:] if words[0] in ("a", "an", "the") and words[1:] else words))
        for sign, *words in spoken
        if words
    ]
    if len(bare) < len(spoken) or len(set(bare)) < len(bare):
        bare = spoken
    patterns: list[tuple[int, str]] = []
    for letter, (sign, *words) in zip(LETTERS, bare, strict=False):
        if not words or bare.count((sign, *words)) > 1 or re.fullmatch(r"[a-z]", "".join(words)):
            continue
        joined = r"\W*".join(map(re.escape, words))
        guard = r"(?<![\w.,-])" if words[0][0].isdigit() else r"(?<![A-Za-z0-9])"
        article = "" if bare is spoken else r"(?:\b(?-i:A(?= [a-z])|an?|An|[Tt]he)\s+)?"
        patterns.append((len(joined), rf"(?P<{letter}>{article}{guard}{sign}{joined}(?![A-Za-z0-9]|[.,]\d))"))
    longest_first = [pattern for _, pattern in sorted(patterns, reverse=True)]
    return rf"(?i:{'|'.join(longest_first) or '(?!)'})"


def _marked(text: str, num_options: int) -> str:
    """The text with \u27e8B\u27e9 where option B is named: `(b)`, `B`, `answer: b`, `B. Blue`, `it is blue`."""
    text = _WORDS_AFTER_CUE.sub(lambda found: found.group(1) + _mark(found.group("words")), text)
    text = _BRACKETED.sub(lambda found: _mark(found.group(1)), text)
    is_pronoun = num_options <= LETTERS.index("I")
    text = _CAPITAL.sub(lambda found: "I" if found.group() == "I" and is_pronoun else _mark(found.group(1)), text)
    if first := _FIRST.match(text):
        text = f"{_mark(first.group(1))}{text[first.end() :]}"
    for pattern in (_FOLLOWS_CUE, _JOINED):
        text = pattern.sub(lambda found: found.group(1) + _mark(found.group(2)), text)
    for pattern in (_LETTER_THEN_WORDS, _WORDS_THEN_LETTER):
        text = pattern.sub(_both, text)
    return text


def _mark(letter: str) -> str:
    return f"\u27e8{letter.upper()}\u27e9"


def _both(found: re.Match[str]) -> str:
    """A letter and the words beside it: one option if they agree, else two."""
    letter, words = found.group("letter"), found.group("words")
    return _mark(letter) if words == letter else f"{_mark(letter)} and {_mark(words)}"


def _without_reasons(marked: str) -> str:
    """Without what follows `because` or, after an option, `Explanation:`, save other options that may be right too."""

    def alternatives(found: re.Match[str]) -> str:
        return " ".join(_ALTERNATIVE.findall(found.group()))

    text = _REASON.sub(alternatives, marked)
    explanation = _EXPLANATION.search(text)
    if (
        explanation is None
        or not _MENTION.search(text[: explanation.start()])
        or re.search(_ANSWER, explanation.group())
    ):
        return text
    return f"{text[: explanation.start()]}{alternatives(explanation)}"


def _settled(text: str) -> set[str]:
    """Letters that a marked text is left with: from the last verdict on, else all if one is put as an answer."""
    standing = _standing(text)
    if not standing:
        return set()
    verdicts = [cue.end() for cue in _VERDICT.finditer(text) if cue.end() <= standing[-1].start()]
    for start in reversed(verdicts):
        later = [mention for mention in standing if mention.start() >= start]
        if not re.search(r"[.;!?]", text[start : later[0].start()]):
            return {mention.group(1) for mention in later}
    leads = {cue.end() for cue in _LEADS_TO.finditer(text)}
    is_label = _OPENING.fullmatch(text, 0, standing[0].start()) and _LABEL_ENDS.match(text, standing[0].end())
    if is_label or any(one.start() in leads or _CONFIRMS.match(text, one.end()) for one in standing):
        return {mention.group(1) for mention in standing}
    return set()


def _standing(text: str) -> list[re.Match[str]]:
    """Mentions that their clause does not deny."""
    standing: list[re.Match[str]] = []
    ends = [end.end() for end in _CLAUSE_END.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        mentions = list(_MENTION.finditer(text, start, end))
        if not mentions:
            continue
        denials = list(_DENIAL.finditer(text, start, end))
        is_left = not any(not denial.group("ahead") and denial.start() > mentions[-1].start() for denial in denials)
        first_denial = min((denial.start() for denial in denials), default=end)
        standing += [mention for mention in mentions if is_left and mention.start() < first_denial]
    return standing


def parse_number(text: str) -> float | None:
    """The one number that `text` states, in digits or words, a unit beside it or not; None where it is none or several.

    `1,000` is a thousand; `3,5`, `1/2`, `3-4` and `at least 3` are nobody's number here, so they are None.
    """
    clean = text
    for pattern, instead in _REWRITTEN:
        clean = re.sub(pattern, instead, clean, flags=re.IGNORECASE)
    clean = unicodedata.normalize("NFKC", clean).strip()
    if lead := list(_NUMBER_CUE.finditer(clean)):
        from_cue = parse_number(clean[lead[-1].end() :]) if lead[-1].end() < len(clean) else None
        if from_cue is not None:
            return from_cue
    clean = _DENIED.sub(" ", clean)
    values = set() if _TANGLED.search(_NUMBER.sub("#", clean)) else set(_stated_numbers(clean))
    value = next(iter(values)) if len(values) == 1 else math.nan
    return value if math.isfinite(value) else None


def _stated_numbers(text: str) -> list[float]:
    """`3`, `3 million`, `twenty-one`, `two thousand and five`; NaN for `three quarters` and `two point five`."""
    values: list[float] = []
    run: list[str] = []
    for piece in [*_PIECE.findall(text.lower()), ""]:
        if run and _goes_on(run[-1], piece):
            run.append(piece)
            continue
        if run and run != ["minus"]:
            is_part = re.fullmatch(r"half|point|(?:third|quarter|fifth|tenth)s?", piece)
            values.append(math.nan if is_part else _run_value(run))
        starts = piece in _WORDS or piece in ("minus", "negative") or _NUMBER.fullmatch(piece)
        run = ["minus" if piece == "negative" else piece] if starts else []
    return values


def _goes_on(last: str, piece: str) -> bool:
    """True where a number that has come to `last` goes on with `piece`."""
    if piece in _SCALES or piece == "plushalf":
        return last not in ("minus", "and")
    if piece == "and":
        return last in _SCALES
    is_unit_of_ten = last in _TENS and 0 < _WORDS.get(piece, 0) < 10
    return is_unit_of_ten or (piece in _WORDS and (last in _SCALES or last in ("minus", "and")))


def _run_value(run: Sequence[str]) -> float:
    total = current = 0.0
    for piece in run:
        if piece in _SCALES:
            current *= _SCALES[piece]
            if _SCALES[piece] >= 1000:
                total, current = total + current, 0.0
        elif piece == "plushalf":
            current += 0.5
        elif piece not in ("minus", "and"):
            current += _WORDS[piece] if piece in _WORDS else float(piece.replace(",", ""))
    return -(total + current) if run[0] == "minus" else total + current


def parse_spans(text: str) -> tuple[tuple[float, float], ...] | None:
    """Time spans in seconds, from `[1.2, 5.8]`, `12 to 17.5 s`, `00:12 - 00:17`; None where the text holds no pairs.

    A time too long for a number is none.
    """
    times = [_seconds(found.group()) for found in _TIME.finditer(text)]
    spans = tuple(zip(times[::2], times[1::2], strict=False))
    if not times or len(times) % 2 or not all(start <= end < math.inf for start, end in spans):
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
