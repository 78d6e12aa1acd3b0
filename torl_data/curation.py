r"""Which problems are fit for training: their kind, their normal form, near duplicates, overlap with benchmarks.

Functions of texts alone; recipes/prepare_data.py runs them over files. Where a rule has to choose, it keeps different
problems apart: the same text with other numbers or operators is another problem.
"""

import hashlib
import re
import unicodedata
import zlib
from collections import Counter
from typing import NamedTuple

import numpy as np
from datasketch import MinHash

# --- Kinds of problems that a verifier cannot grade -----------------------------------------------------------------

_PROOF = re.compile(r"(?i)\b(?:(?:prove|disprove|show)(?:\s+(?:that|the|if|whether)\b|:)|give an? (?:\w+ )?proof)")
_ASKS = re.compile(
    r"(?i)\?|\b(?:calculate|comput\w+|determine|evaluate|express|find|how (?:many|much)|simplify|solve|what)\b"
)
_OPEN = re.compile(r"(?i)\b(?:(?:explain|describe) (?:how|why|your)|justify your|give an example|answers? may vary)")
_NO_ANSWER = re.compile(r"(?is)\W*(?:see (?:the )?(?:proof|solution|below)|(?:the )?proof|not ?found)\b.*")
_WORD = re.compile(r"\\[A-Za-z]+|([^\W\d_]{2,})")  # no command is one
_CHOICES = tuple(
    re.compile("(?s)" + ".+?".join(label % letter for letter in letters))
    for label, letters in (
        (r"(?<!(?<![a-zA-Z])[a-zA-Z])[(（]\s*(?:\\\w+\{)?%s\}?\s*[)）](?!\s*[+=*/,])", "ABC"),  # (A), but not f(A)+
        (r"(?:(?<=[\s$])|^)%s\s?[.:)、．]", "ABCD"),  # A. or A); one more, since points have such names
    )
)
_CHOSEN = re.compile(
    r"(?s)\W*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*"
    r"(?:(?P<said>(?i:yes|no|true|false))[\s}.]*|\(?[A-F]\)[\s}]*.*|[A-F](?:\s*,\s*[A-F])*[\s}.]*)\W*"
)
_OPTIONS = re.compile(r"(?i)\b(?:options?|choices?|letters?|statements?|select|following)\b")
_PARTS = tuple(
    re.compile(r"(?s)" + r"(.+?)".join(rf"[\s.;:?!,$][(（]?\s*{label}\s*[)）]" for label in labels) + "(.+)")
    for labels in ("ab", "12", ("i", "ii"))
)
_PART_ANSWERS = re.compile(r"(?s)\(?\b(?:a|i|1)\).+[\s;,]\(?\b(?:b|ii|2)\)")


def is_open(problem: str, answer: str, question_type: str = "") -> bool:
    """Whether it is a proof, or a question whose answer is prose. `question_type` is NuminaMath-1.5's column."""
    proof = _PROOF.search(problem)
    return bool(
        (question_type == "proof" or _NO_ANSWER.fullmatch(answer) or _OPEN.search(problem))
        or (proof and not _ASKS.search(problem, proof.end()))
        or sum(map(bool, _WORD.findall(answer))) > 5  # prose; "8 square centimeters per second" is not
    )


def is_multiple_choice(problem: str, answer: str, question_type: str = "") -> bool:
    """Whether the answer can be guessed: options are listed, or it is yes, no, true, false or the letter of one."""
    listed = question_type == "MCQ" or any(labels.search(problem) for labels in _CHOICES)
    chosen = _CHOSEN.fullmatch(answer)
    return listed or (chosen is not None and bool(chosen["said"] or _OPTIONS.search(problem)))


def has_parts(problem: str, answer: str) -> bool:
    """Whether several answers are asked for, (a), (b) ...; numbered conditions are no parts, since a part asks."""
    parts = [match.groups() for pattern in _PARTS if (match := pattern.search(" " + _FIGURE.sub("", problem)))]
    return bool(_PART_ANSWERS.search(answer)) or any(all(map(_ASKS.search, pair)) for pair in parts)


_SYMBOLS = str.maketrans("−–—×·∙÷", "-- ***/") | str.maketrans(
    {"≤": "<=", "≥": ">=", "≠": "!=", "√": "sqrt ", "π": "pi ", "°": "^circ ", "∠": "angle ", "²": "^2", "³": "^3"}
)
_FONTS = "text(?:bf|it|rm)?|math(?:rm|bf|bb|it)|mbox|hbox|operatorname|emph"
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!|,)(?=\d{3}(?!\d))", ""),  # 1,000
        (r"\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\}|\[[^\]]*\])?|\\[,;:! \\()\[\]]|~|[_^]\{\}", " "),
        (rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\\(?:left|right|(?:display|text)style|limits|q?quad|[bB]ig+[lr]?|rm|bf|it|overline|mathcal)(?![a-z])", " "),
        (r"\\[dtc]?frac(?![a-z])\s*(\d)(\d)(?!\d)", r" frac \1 \2 "),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\[lcdv]?dots[bcimo]?(?![a-z])|\.\.\.|…", " dots "),
        (r"\\(?:cdot|times)(?![a-z])", "*"),
        (r"\\div(?![a-z])", "/"),
        (r"\\l(?:eq?|eqslant)(?![a-z])", "<="),
        (r"\\g(?:eq?|eqslant)(?![a-z])", ">="),
        (r"\\neq?(?![a-z])|\\not\s*=", "!="),
        (r"(?<![^\W\d_])([^\W\d_])\s+(?=[^\W\d_](?![^\W\d_]))", r"\1"),  # a b c, as scans space it, is abc
        (r"\{\s*(\w+)\s*\}", r" \1 "),  # x^{2} is x^2
    )
)
_FIGURE = re.compile(r"(?s)\[asy\].*?(?:\[/asy\]|\Z)|!\[[^\]]*\]\([^)]*\)|\\includegraphics\S*")
_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)?|[-+*/^=<>!%|()\[\]_]")
_SIGN = re.compile(
    r"\d.*|[-+*/^=<>!%|]|(?!(?:an?|as|at|be|by|do|he|if|i[nst]|me|my|no|o[fnr]|so|to|u[ps]|we)\Z)[^\W\d_]{1,2}"
    r"|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|exp|gcd|lcm|mod|max|min|det|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|half|third|twice|double|triple|odd|even|smallest|largest|minimum|maximum"
)


def normal_tokens(text: str, *, figures: bool = True) -> list[str]:
    """Return what is left of a text when typography is gone: words, numbers, operators and brackets, in order.

    Punctuation, dollar signs, the case of words and the commands that only shape formulas go. Operators stay:
    z^4+z^2+1 is not z^4-z^2+1. Without `figures` drawing code goes, unless it is nearly all there is.
    """
    if not figures and len(tokens := normal_tokens(_FIGURE.sub(" ", text))) >= MIN_OVERLAP_TOKENS:
        return tokens
    text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS))
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    tokens = _TOKEN.findall(text.replace("{", "(").replace("}", ")"))  # x^{a+b} is not x^a+b
    return [token if token.isupper() and token != "A" else token.lower() for token in tokens]


def signs(tokens: list[str]) -> Counter[str]:
    """Return the numbers, operators and names (2, two, +, x, AB, cos) of a problem: what makes it another problem."""
    return Counter(token for token in tokens if token.isupper() or _SIGN.fullmatch(token))


def shingles(tokens: list[str]) -> set[int]:
    """Return hashes of all runs of three tokens."""
    return {zlib.crc32(" ".join(tokens[i : i + 3]).encode()) for i in range(max(1, len(tokens) - 2))}


# --- Copies: duplicates, and problems of benchmarks ------------------------------------------------------------------

_EMPTY = MinHash(num_perm=64)


class Sketch(NamedTuple):
    """What is kept in memory of a problem: 8-byte hashes of its normal form, of its answer's, and of its signs with
    the answer (its kind), and the MinHash of its shingles (256 bytes)."""

    form: int
    answer: int
    kind: int
    minhash: bytes


def sketch(problem: str, answer: str) -> Sketch:
    """Return the sketch of a problem."""
    tokens, answer_form = normal_tokens(problem), " ".join(normal_tokens(answer))
    # Permutations are shared: making them anew takes longer than all the rest.
    minhash = MinHash(hashfunc=int, permutations=_EMPTY.permutations, scheme=_EMPTY.scheme, num_perm=_EMPTY.num_perm)
    minhash.update_batch(shingles(tokens))
    kind = repr((answer_form, sorted(signs(tokens).items())))
    return Sketch(_hash(" ".join(tokens)), _hash(answer_form), _hash(kind), minhash.hashvalues.tobytes())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class NearDuplicates:
    """Finds problems that differ in their wording only: the same answer, numbers, operators and names, and an
    estimated Jaccard similarity of their shingles of at least `threshold` (standard error 0.06 at most).

    Within their kind they need no index of bands: datasketch's takes 2.8 KB a problem, the signatures alone 0.5 KB.
    """

    def __init__(self, threshold: float = 0.6):
        self.threshold = threshold
        self._kinds: dict[int, list[tuple[str, bytes]]] = {}

    def find_or_add(self, problem_id: str, sketch: Sketch) -> tuple[str, float] | None:
        """Return the id of an earlier problem and the similarity; a problem without one is kept for later ones."""
        kind = self._kinds.setdefault(sketch.kind, [])
        values = np.frombuffer(sketch.minhash, np.uint32)
        for earlier, minhash in kind:
            if (similarity := float(np.mean(np.frombuffer(minhash, np.uint32) == values))) >= self.threshold:
                return earlier, similarity
        kind.append((problem_id, sketch.minhash))
        return None


MIN_OVERLAP_TOKENS = 20  # shorter problems are contained in many others by chance: there only equality counts


class Hit(NamedTuple):
    """A problem that is one of a benchmark: `overlap` is the share of shingles, 1.0 for an equal normal form."""

    benchmark: str
    benchmark_id: str
    overlap: float
    exact: bool


class Benchmarks:
    """The problems that training must not see. A problem is one of them when their normal forms are equal, or when it
    has all of the benchmark's numbers, operators and names and at least `threshold` of its shingles (reworded, or
    "find m+n" added); where it has no others, `threshold` is of the shorter one's shingles."""

    def __init__(self, threshold: float = 0.85):
        self.threshold = threshold
        self._exact: dict[str, int] = {}
        self._known: list[tuple[str, str, int, Counter[str]]] = []
        self._places: dict[int, list[int]] = {}

    def add(self, benchmark: str, benchmark_id: str, problem: str) -> None:
        """Add one problem of a benchmark."""
        tokens = normal_tokens(problem, figures=False)
        place, parts = len(self._known), shingles(tokens)
        self._exact.setdefault(" ".join(tokens), place)
        self._known.append((benchmark, benchmark_id, len(parts), signs(tokens)))
        for part in parts if len(tokens) >= MIN_OVERLAP_TOKENS else ():
            self._places.setdefault(part, []).append(place)

    def find(self, problem: str) -> Hit | None:
        """Return the benchmark problem that `problem` is, the most similar if several."""
        tokens = normal_tokens(problem, figures=False)
        if (place := self._exact.get(" ".join(tokens))) is not None:
            return Hit(*self._known[place][:2], overlap=1.0, exact=True)
        parts, own_signs = shingles(tokens), signs(tokens)
        shared = Counter(place for part in parts for place in self._places.get(part, ()))
        for place, count in shared.most_common() if len(tokens) >= MIN_OVERLAP_TOKENS else ():
            benchmark, benchmark_id, size, known_signs = self._known[place]
            overlap = count / (min(size, len(parts)) if own_signs == known_signs else size)
            if overlap >= self.threshold and known_signs <= own_signs:
                return Hit(benchmark, benchmark_id, overlap, exact=False)
        return None
