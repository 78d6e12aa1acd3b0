"""Public cases (by id, in verify_cases.jsonl) on which the grader decides otherwise than the test they come from.

Each says what stands in the test, and who is wrong.
"""

CHAIN = "theirs: 'x = 5+5+1 = 1/3' and '3+3 = 2' claim two values, of which one is wrong"
PERCENT = "by rule: a percent sign is a unit as in 10 = 10% (493-496, 529), so that 4 4/9% is 4 4/9 and not 40/900"

KNOWN = {
    157: CHAIN,
    170: CHAIN,
    446: CHAIN,
    176: "theirs: the twin of 175 with math-verify's option off that compares intervals with inequalities; ours is on",
    253: "theirs: 1 - 1/e and 1 + 1/e differ",
    258: "theirs: the solution has two boxes with '++++++' between them; ours takes the last",
    599: PERCENT,
    600: PERCENT,
}
ACCEPTED = {176, 600}
"""Those that we accept and their test refuses."""
