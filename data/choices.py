"""Which options a text names, which of them it denies, and which it is left with.

Every option that is named, by letter or by words, is first marked as ⟨B⟩; what the marks stand among then decides. A
wrong reading must never earn a reward, so a text that is not settled names several options or none. Knows options by
letter only: the pattern of their words is given. Knows nothing about rewards.
"""

from __future__ import annotations

import re
import unicodedata

_PLAIN = [
    (r"\\(?:text|math)[a-z]*|[\u2018\u201c\u201d]", " "),
    (r"\\f?boxed", " answer is "),
    (r"<(b|i|u|em|strong|p|span)>([^<]*)</\1>", r" \2 "),
    (r"(?<=\w)['\u2019](?=\w)", ""),
    (r"[*_`\"'${}~\\#]", " "),
    (r"\u2212", "-"),
    (r"[⟪⟫]", " "),
    (r"[^\S\n]+", " "),
    (r" ?\n\s*", "\n"),
    (r"\b(?:no|without|without a|beyond) (?:doubt|question)\b", " "),
    (r"\b(?:all|everything|anything|any|none) but\b", "except"),
]
"""Pattern and what stands for it before options are looked for."""
_ANSWER = (
    r"(?:\b(?:answer|ans|solution|conclusion|(?:correct|right|final|best) (?:option|choice|one|letter))\b|答案|正解)"
)
"""What comes before the verdict; the last one counts."""
_NAMING = (
    r"(?:\b(?:option|choice|choose|chose|pick|select|go(?:ing)? with|its|(?:it|this|that) is|wait"
    r"|actually|think|believe|guess|alternatively|maybe|perhaps|possibly|(?:could|might|may)(?: also)? be)\b|选择?|選)"
)
"""What comes before an option, in any letter case or in words."""
_HINT = (
    r"\b(?:is|be|therefore|thus|hence|so|say|probably|likely|clearly|definitely"
    r"|correct|right|final|result|response|looks like|but|yes|letter|chosen|picked|selected)\b"
)
"""What comes before an option that is a capital letter."""
_LINK = (
    r"[^\w⟨]*(?:\b(?:the|an?|is|be|would|should|must|option|choice|letter|most|likely|probably|definitely"
    r"|clearly|then|either|both|to|question|here|my|final)\b[^\w⟨]*)*"
)
_CLAUSE_ENDS = r"\s*(?:$|[^\w\s-](?!\w)|(?:because|since|or|and|not|but)\b)"
_BRACKETED = re.compile(r"(?<![A-Za-z0-9])[(\[<【「⟨]\s*([A-Za-z])\s*\.?[)\]>】」⟩]")
_FIRST = re.compile(
    r"\W*(?<![\w⟨])([a-z])"
    r"(?=\s*[.):\],](?!\w)|\W*$| (?:or|and|not|because|is(?: the)? (?:correct|right|answer))\b)"
)
_WORDS_OF = r"⟪(?P<words>[A-Z])\d+⟫"
_WORDS_ALONE = re.compile(rf"\W*?{_WORDS_OF}\W*")
_WORDS_AFTER_CUE = re.compile(
    rf"(?i:{_ANSWER}(?: [a-z]+){{0,6}}? ?(?:\bis\b|\bbe\b|[:=是为])|{_NAMING}|\A)[^\w⟨⟪-]*"
    rf"{_WORDS_OF}(?={_CLAUSE_ENDS})"
)
_LETTER_THEN_WORDS = re.compile(
    r"⟨(?P<letter>.)⟩[\s.):\]\-\u2013\u2014,=(]*(?:(?i:or|and|maybe|perhaps|also|possibly|alternatively)\s+)*"
    rf"{_WORDS_OF}\)?"
)
_WORDS_THEN_LETTER = re.compile(rf"{_WORDS_OF}[\s.:,=-]*⟨(?P<letter>.)⟩")
_FOLLOWS_CUE = re.compile(rf"((?i:{_ANSWER}|{_NAMING}){_LINK})(?<![A-Za-z0-9])([a-z])(?![A-Za-z0-9])(?={_CLAUSE_ENDS})")
_JOINED = re.compile(r"(⟩(?:,|/|&|\s|\b(?:or|and|nor)\b)+)(?<![a-z])([a-z])(?![A-Za-z0-9]|\s+\w)")
_AFTER_A = r"(?:or|and|nor|but|not|is|was|isnt|would|could|cannot|seems|because|since|over|rather|instead)\b"
_CAPITAL = re.compile(
    r"(?<![A-Za-z0-9⟨⟪])(?<![A-Za-z]-)(?<!\b[A-Z]\.)([A-Z])(?![A-Za-z0-9+⟩]|-[A-Za-z]|\.[A-Z]\b)"
    rf"(?:(?<![AI])|(?! (?!{_AFTER_A})\w))"
)
_MENTION = re.compile("⟨(.)⟩")

_REASON = re.compile(r"\b(?:because|since)\b(?>(?:(?!answer)[^.;!?,\n])*)", re.IGNORECASE)
_EXPLANATION = re.compile(
    r"\b(?:explanation|reason|reasoning|rationale|justification)\s*(?::|\bis\b).*", re.IGNORECASE | re.DOTALL
)
_ALTERNATIVE = re.compile(
    r"\b(?:or|also|alternatively|maybe|perhaps|possibly|could|might|may)(?:\W+(?:be|option))*\W*⟨.⟩", re.IGNORECASE
)
_NOT_JUDGED = (
    r"(?!\s*(?:(?:thats|its|(?:that|this|it|which) is) )?(?:wrong|incorrect|false"
    r"|no(?=\W*$|[.,;!])|(?:not|isnt) (?:correct|right|it|the))\b)"
)
_IN_LIST = r"\s*(?:(?:or|and|nor) )?(?:(?:option|choice) )?⟨.⟩(?! (?:is|was|isnt|cannot|would|could|might|may)\b)"
_CLAUSE_END = re.compile(
    rf"(?:[.;!?\n]| [-\u2013\u2014]+ |(?<!⟩),|(?<=⟩),(?!{_IN_LIST})|(?<!not):){_NOT_JUDGED}"
    rf"|\b(?:but|however|whereas|while|although|though|so|then|therefore|thus|hence)\b"
    rf"|(?<!⟩) (?:and|or)\b|\b(?:and|or)\b(?!{_IN_LIST})",
    re.IGNORECASE,
)
_DENIAL = re.compile(
    r"\b(?:not(?! (?:only|just|merely))|never|cannot|(?:is|are|was|were|do|does|did|could|would|should|wo|ca)nt"
    r"|wrong|incorrect|false|untrue|invalid|impossible|unlikely|doubt|disagree|eliminated|excluded|ruled out|rejected"
    r"|discarded|dismissed|no(?=\W*$|[.,;!]))\b|不|非|错"
    r"|\b(?P<ahead>no|none|nor|neither|instead of|than|over|unlike|least|refuse|avoid|except|without"
    r"|eliminat(?:e|ing)|exclud(?:e|ing)"
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
_MORE_WORDS = re.compile(
    rf" (?!{_DENIAL.pattern}|(?:is|are|was|were|can|could|may|might|would|seems|looks|must|should"
    r"|has|does|fits|matches|and|or|but"
    r"|because|since|rather)\b)\w",
    re.IGNORECASE,
)
"""An option's words that go on, so that its letter is still a label: `B. A cup` and then `on a table`."""
_LEADS_TO = re.compile(rf"(?i:{_ANSWER}|{_NAMING}|{_HINT}){_LINK}(?=⟨)")
_VERDICT = re.compile(rf"(?i:{_ANSWER})[^.;!?⟨]{{0,60}}(?=⟨)")
_OPENING = re.compile(
    r"\W*(?:\d+[.)]\s*)?(?:both|either|yes|ok|okay|sure|well|hmm|of course|choosing)?\W*", re.IGNORECASE
)
_LABEL_ENDS = re.compile(
    r"\s*$|\s*[^\w\s]|\n| (?:or|and|nor|because|since|not|but|rather|instead|over|then|it is|of course|definitely)\b",
    re.IGNORECASE,
)


def options_named(text: str, wordings: str, num_options: int) -> set[str]:
    """Letters that a text is left with, capitals, of `num_options` options or not.

    Args:
        wordings: pattern of any option's words; the group that matched is the option's letter.
    """
    clean = unicodedata.normalize("NFKC", text)
    for pattern, instead in _PLAIN:
        clean = re.sub(pattern, instead, clean, flags=re.IGNORECASE)
    if alone := re.fullmatch(r"\W*([A-Za-z])(?!\+)\W*", clean):
        return {alone.group(1).upper()}
    texts: list[str] = []

    def words_mark(found: re.Match[str]) -> str:
        texts.append(found.group())
        return f"⟪{found.lastgroup}{len(texts) - 1}⟫"

    worded = re.sub(wordings, words_mark, clean.strip())
    if option := _WORDS_ALONE.fullmatch(worded):
        return {option.group("words")}
    marked = re.sub(r"⟪[A-Z](\d+)⟫", lambda found: texts[int(found.group(1))], _marked(worded, num_options))
    return _settled(_without_reasons(marked))


def _marked(text: str, num_options: int) -> str:
    """The text with ⟨B⟩ where option B is named: `(b)`, `B`, `answer: b`, `B. Blue`, `it is blue`."""
    if _WORDS_AFTER_CUE.search(text):
        text = re.sub(_WORDS_OF, lambda found: _mark(found.group("words")), text)
    text = _BRACKETED.sub(lambda found: _mark(found.group(1)), text)
    is_pronoun = num_options < 9
    text = _CAPITAL.sub(lambda found: "I" if found.group() == "I" and is_pronoun else _mark(found.group(1)), text)
    if first := _FIRST.match(text):
        text = f"{_mark(first.group(1))}{text[first.end() :]}"
    for pattern in (_FOLLOWS_CUE, _JOINED):
        text = pattern.sub(lambda found: found.group(1) + _mark(found.group(2)), text)
    for pattern in (_LETTER_THEN_WORDS, _WORDS_THEN_LETTER):
        text = pattern.sub(_both, text)
    return text


def _mark(letter: str) -> str:
    return f"⟨{letter.upper()}⟩"


def _both(found: re.Match[str]) -> str:
    """A letter and the words beside it: one option if they agree, else two."""
    letter, words = found.group("letter"), found.group("words")
    if words != letter:
        return f"{_mark(letter)} and {_mark(words)}"
    return _mark(letter) + (":" if _MORE_WORDS.match(found.string, found.end()) else "")


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
