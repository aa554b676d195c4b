"""Regular English inflection, and the irregular words for which it would be wrong.

Used to put a synonym into the form of the word it replaces. Where a form can't be known from spelling (stress decides
whether a last consonant is doubled), the answer is None and the caller takes another word.
"""

from __future__ import annotations

import re

from swift.data.augment.text import word_set

# base, past, participle (own list of the common ones); compounds (`overtake`, `undo`) go by their last part
_VERBS = """
arise arose arisen|awake awoke awoken|bear bore borne|beat beat beaten|become became become|begin began begun|
bend bent bent|bet bet bet|bid bid bid|bind bound bound|bite bit bitten|bleed bled bled|blow blew blown|
break broke broken|breed bred bred|bring brought brought|build built built|burn burnt burnt|burst burst burst|
buy bought bought|cast cast cast|catch caught caught|choose chose chosen|cling clung clung|come came come|
cost cost cost|creep crept crept|cut cut cut|deal dealt dealt|dig dug dug|do did done|draw drew drawn|
dream dreamt dreamt|drink drank drunk|drive drove driven|dwell dwelt dwelt|eat ate eaten|fall fell fallen|
feed fed fed|feel felt felt|fight fought fought|find found found|fit fit fit|flee fled fled|fling flung flung|
fly flew flown|forbid forbade forbidden|forecast forecast forecast|forget forgot forgotten|forgive forgave forgiven|
freeze froze frozen|get got got|give gave given|go went gone|grind ground ground|grow grew grown|hang hung hung|
have had had|hear heard heard|hide hid hidden|hit hit hit|hold held held|hurt hurt hurt|keep kept kept|
kneel knelt knelt|knit knit knit|know knew known|lay laid laid|lead led led|lean leant leant|leap leapt leapt|
learn learnt learnt|leave left left|lend lent lent|let let let|lie lay lain|light lit lit|lose lost lost|
make made made|mean meant meant|meet met met|mow mowed mown|pay paid paid|prove proved proven|put put put|
quit quit quit|read read read|rend rent rent|rid rid rid|ride rode ridden|ring rang rung|rise rose risen|run ran run|
saw sawed sawn|say said said|see saw seen|seek sought sought|sell sold sold|send sent sent|set set set|
sew sewed sewn|shake shook shaken|shear sheared shorn|shed shed shed|shine shone shone|shoe shod shod|
shoot shot shot|show showed shown|shrink shrank shrunk|shut shut shut|sing sang sung|sink sank sunk|sit sat sat|
slay slew slain|sleep slept slept|slide slid slid|sling slung slung|slit slit slit|smell smelt smelt|
sow sowed sown|speak spoke spoken|speed sped sped|spell spelt spelt|spend spent spent|spill spilt spilt|
spin spun spun|spit spat spat|split split split|spoil spoilt spoilt|spread spread spread|spring sprang sprung|
stand stood stood|steal stole stolen|stick stuck stuck|sting stung stung|stink stank stunk|stride strode stridden|
strike struck struck|string strung strung|strive strove striven|swear swore sworn|sweep swept swept|
swell swelled swollen|swim swam swum|swing swung swung|take took taken|teach taught taught|tear tore torn|
tell told told|think thought thought|throw threw thrown|thrust thrust thrust|tread trod trodden|wake woke woken|
wear wore worn|weave wove woven|wed wed wed|weep wept wept|wet wet wet|win won won|wind wound wound|
wring wrung wrung|write wrote written|be was been|
beseech besought besought|forsake forsook forsaken|
partake partook partaken|smite smote smitten|thrive throve thriven|strew strewed strewn|
hew hewed hewn|cleave cleft cloven|
beget begot begotten|gainsay gainsaid gainsaid|waylay waylaid waylaid|shrive shrove shriven|
reave reft reft|rive rived riven
"""
_PARTS = [entry.split() for entry in _VERBS.replace("\n", "").split("|")]
IRREGULAR_VERBS = frozenset(parts[0] for parts in _PARTS)
# forms that could be mistaken for a base form (`saw`, `left`, `found`); those equal to their base are no mistake
IRREGULAR_FORMS = frozenset(form for base, *forms in _PARTS for form in forms if form != base) | {"were", "lain"}
# words that end like an irregular verb and are regular
_REGULAR = word_set(
    """accost approve behave blend clean close comprise defeat delight disapprove disclose enclose highlight improve
    heat offend repeat reprove shave slight stake surprise treat welcome"""
)
_COMPOUND = re.compile(
    r"(?:back|baby-?|broad|counter|cross|fore?|hand|in|inter|mis|off|out|over|re|sub|type|un|under|up|with)"
    r"(?:bid|cut|dig|do|eat|fit|fly|get|go|hit|lay|let|lie|pay|put|run|say|see|set|shut|sit|win)"
)

# final consonant doubled though the word has several syllables: the stress lies on the last
_DOUBLED = word_set(
    """abet abhor abut acquit admit allot annul appal aver befit beget begin bedim beset commit compel concur confer
    control corral debar defer demur deter disinter dispel distil emit enrol equip excel expel extol forget impel incur
    infer inter occur omit outwit patrol permit prefer propel rebel rebut recap recur refer regret remit repel
    submit transfer transmit upset"""
)
# final consonant never doubled after an unstressed syllable that ends so
_UNSTRESSED = re.compile(
    r"(?:[^aeiou](?:er|en|on|or|ar|om)|velop|(?:k|dg|rg|sk)et|(?:[cdhlnrux]|pos|vis|prof|benef)it|(?:^|de)limit|vomit)$"
)

_UNCOUNTABLE = word_set(
    """advice aid air baggage bread cash chaos clothing coal cotton data dirt dust education electricity equipment
    evidence flour food fun furniture garbage gold grass hair happiness harm health heat help homework housing
    information ink intelligence jewelry knowledge laughter leather luck luggage machinery mail mathematics meat
    milk money mud music news nonsense oil oxygen patience physics poetry progress rain research rice rubbish
    safety sand scenery series sheep shopping silk silver snow software species spelling steel sugar sunshine
    tennis thunder traffic transportation trash travel trouble vocabulary water weather wildlife wisdom wood
    wool deer fish moose salmon trout aircraft offspring scissors trousers pants goods thanks premises
    headquarters people police cattle staff"""
)
_IRREGULAR_NOUNS = word_set(
    """man woman child tooth foot goose mouse louse ox person die penny brother calf elf half hoof knife leaf life loaf
    scarf self sheaf shelf thief wife wolf dwarf wharf analysis axis basis crisis diagnosis ellipsis emphasis
    hypothesis oasis parenthesis synopsis synthesis thesis bacterium curriculum datum erratum medium memorandum
    ovum stratum addendum alumnus cactus focus fungus nucleus radius stimulus syllabus terminus corpus genus
    opus antenna formula larva nebula vertebra criterion phenomenon automaton appendix index matrix vertex
    vortex codex beau bureau plateau tableau quiz photo piano halo solo auto memo logo kilo video radio studio
    ratio portfolio zoo kangaroo tattoo shampoo casino disco euro ego tempo concerto soprano alto dynamo embryo
    jumbo limbo tango turbo commando buffalo motto volcano mango tornado cargo zero"""
)
_VOWEL_GROUP = re.compile(r"[aeiouy]+")


def _is_irregular_verb(base: str) -> bool:
    """Whether a verb is irregular or, being a compound of an irregular one, may be."""
    if base in IRREGULAR_VERBS or _COMPOUND.fullmatch(base):
        return True
    return base not in _REGULAR and any(base[-n:] in IRREGULAR_VERBS for n in range(4, len(base)))


def _has_one_syllable(word: str) -> bool:
    return len(_VOWEL_GROUP.findall(re.sub(r"(?<=[^aeiouy])e$", "", word))) == 1


def _doubles(base: str) -> bool | None:
    """Whether the last consonant is doubled before -ed and -ing; None if spelling doesn't tell."""
    if not re.search(r"(?:^|[^aeiou]|qu)[aeiou][bdfgklmnprstvz]$", base):
        return False
    if base.endswith("s") or _COMPOUND.fullmatch(base):  # `gas`, `focus`, `bias`: both spellings live
        return None
    if base in _DOUBLED or _has_one_syllable(base):
        return True
    return False if _UNSTRESSED.search(base) else None


def with_s(base: str) -> str:
    """The plural, or the third person, by the regular spelling: `box` -> `boxes`, `try` -> `tries`."""
    if re.search(r"(?:s|x|z|ch|sh)$", base):
        return base + "es"
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ies"
    return base + "s"


def plural(noun: str) -> str | None:
    """The plural of a noun; None for irregular and uncountable ones and for endings that vary (-f, -o, -man, -is)."""
    if noun in _UNCOUNTABLE or noun in _IRREGULAR_NOUNS or "-" in noun:
        return None
    if re.search(r"(?:fe?|o|man|child|tooth|foot|mouse|louse|is|us|um|ics|ness|eau|ex|ix|yx)$", noun):
        return None
    if noun.endswith("s") and not noun.endswith("ss"):
        return None
    if noun.endswith(("z", "ch")) and re.search(r"(?:[^z]z|arch|omach|och)$", noun):  # `quiz`; `monarchs`
        return None
    return with_s(noun)


def third_person(verb: str) -> str | None:
    """`he …s`; None where spelling doesn't tell."""
    if verb in ("be", "have", "do", "go") or re.search(r"[^aeiou]o$|[aeiou]z$|[^s]s$|och$", verb):
        return None
    return with_s(verb)


def past(verb: str) -> str | None:
    """The regular past and participle; None for irregular verbs and where spelling doesn't tell."""
    if _is_irregular_verb(verb) or verb.endswith(("c", "i")):
        return None
    doubles = _doubles(verb)
    if doubles is None:
        return None
    if doubles:
        return verb + verb[-1] + "ed"
    if verb.endswith("e"):
        return verb + "d"
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ied"
    return verb + "ed"


def gerund(verb: str) -> str | None:
    """The -ing form, also of irregular verbs; None where spelling doesn't tell."""
    if verb == "be" or verb.endswith(("c", "i")) or verb in ("singe", "swinge", "tinge", "dye", "age"):
        return None
    doubles = _doubles(verb)
    if doubles is None:
        return None
    if doubles:
        return verb + verb[-1] + "ing"
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and not re.search(r"(?:ee|oe|ye)$", verb):
        return verb[:-1] + "ing"
    return verb + "ing"


FORMS = {"ns": plural, "vs": third_person, "ved": past, "ving": gerund}


def possible_bases(word: str) -> list[tuple[str, str]]:
    """(base, form) pairs whose form, made by the rules above, is the word. Forms are the keys of `FORMS`."""
    found = []
    for ending, forms in (("s", ("ns", "vs")), ("ed", ("ved",)), ("ing", ("ving",))):
        if not word.endswith(ending) or len(word) < len(ending) + 2:
            continue
        stem = word[: -len(ending)]
        bases = [stem, stem + "e"]
        if ending == "s":
            bases = [stem] + ([stem[:-1]] if stem.endswith("e") else [])
            bases += [stem[:-2] + "y"] if stem.endswith("ie") else []
        elif len(stem) > 2 and stem[-1] == stem[-2]:
            bases.append(stem[:-1])
        if ending == "ed" and stem.endswith("i"):
            bases.append(stem[:-1] + "y")
        if ending == "ing" and stem.endswith("y"):
            bases.append(stem[:-1] + "ie")
        found += [(base, form) for base in bases for form in forms if len(base) > 2 and FORMS[form](base) == word]
    return found
