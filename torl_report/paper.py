"""The paper's own curves (arXiv 2503.23383), to draw beside a run's.

Read from the vector paths of its PDF: values are within 0.001 of the drawn line (accuracies too), steps within 3. All
are smoothed by the authors. The paper trains on its own 28,740 problems with 128 prompts of 16 rollouts a step; its
accuracies are greedy, over five benchmarks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaperCurve:
    """A line of a figure, for the metric of ours that measures the same; `points` are (step, value)."""

    metric: str
    name: str
    figure: str
    points: tuple[tuple[int, float], ...]


def _curve(metric: str, name: str, figure: str, text: str) -> PaperCurve:
    pairs = (pair.split(":") for pair in text.split())
    return PaperCurve(metric, name, figure, tuple((int(step), float(value)) for step, value in pairs))


PAPER_CURVES = (
    _curve(
        "reward",
        "paper, 1.5B, C = 1",
        "Figure 6b",
        "0:-0.709 15:-0.679 31:-0.691 47:-0.692 63:-0.656 79:-0.641 95:-0.570 111:-0.534 127:-0.498 "
        "143:-0.458 159:-0.464 175:-0.479 191:-0.465 207:-0.452 215:-0.441",
    ),
    _curve(
        "reward",
        "paper, 1.5B, C = 2",
        "Figure 6b",
        "0:-0.706 15:-0.700 31:-0.692 47:-0.683 63:-0.636 79:-0.616 95:-0.548 111:-0.529 127:-0.486 "
        "143:-0.444 159:-0.446 175:-0.471 191:-0.451 207:-0.433 215:-0.416",
    ),
    _curve(
        "accuracy",
        "paper, 1.5B, five benchmarks",
        "Figure 6a, C = 1",
        "0:0.365 16:0.386 32:0.390 48:0.377 64:0.383 80:0.374 96:0.381 112:0.385 128:0.395 144:0.399 "
        "160:0.394 176:0.396 191:0.398 207:0.410 215:0.409",
    ),
    _curve(
        "accuracy",
        "paper, 7B, five benchmarks",
        "Figure 4",
        "0:0.429 35:0.453 71:0.461 107:0.478 143:0.494 179:0.497 215:0.494 251:0.500 287:0.499 323:0.502 "
        "359:0.510 395:0.525 431:0.535 467:0.529 503:0.531 539:0.535 559:0.537",
    ),
    _curve(
        "tools/code_ratio",
        "paper, 1.5B",
        "Figure 5a",
        "0:0.369 49:0.825 99:0.817 149:0.844 199:0.855 248:0.875 298:0.873 348:0.889 398:0.890 448:0.901 "
        "498:0.921 548:0.898 598:0.906 648:0.862 698:0.902 748:0.895 798:0.897 848:0.898 898:0.916 948:0.919 "
        "998:0.928",
    ),
    _curve(
        "tools/pass_ratio",
        "paper, 1.5B",
        "Figure 5b",
        "0:0.799 47:0.794 97:0.803 147:0.813 197:0.816 247:0.815 297:0.811 347:0.814 397:0.820 447:0.817 "
        "496:0.825 546:0.823 596:0.820 646:0.837 696:0.811 746:0.830 796:0.821 846:0.828 896:0.828 946:0.823 "
        "996:0.831",
    ),
    _curve(
        "tools/pass_ratio_correct",
        "paper, 1.5B",
        "Figure 5c",
        "0:0.895 50:0.908 100:0.898 150:0.916 200:0.917 250:0.916 300:0.916 350:0.904 400:0.923 450:0.921 "
        "500:0.905 550:0.921 600:0.902 650:0.918 700:0.896 750:0.915 800:0.892 850:0.912 900:0.906 950:0.910 "
        "1000:0.908",
    ),
    _curve(
        "tools/pass_ratio_incorrect",
        "paper, 1.5B",
        "Figure 5c",
        "0:0.767 50:0.752 100:0.765 150:0.772 200:0.774 250:0.767 300:0.760 350:0.766 400:0.765 450:0.754 "
        "500:0.771 550:0.761 600:0.760 650:0.779 700:0.748 750:0.769 800:0.770 850:0.762 900:0.763 950:0.757 "
        "1000:0.761",
    ),
    _curve(
        "tools/executed_code_ratio",
        "paper, 1.5B",
        "Figure 5d",
        "0:0.659 44:0.659 94:0.681 144:0.697 194:0.713 243:0.721 293:0.730 343:0.742 393:0.761 443:0.768 "
        "493:0.777 543:0.795 593:0.793 643:0.817 693:0.805 743:0.827 793:0.823 843:0.837 893:0.833 943:0.837 "
        "993:0.835",
    ),
    _curve(
        "tools/code_before_answer_ratio",
        "paper, 1.5B",
        "Figure 5d",
        "0:0.941 44:0.891 94:0.916 144:0.934 194:0.954 243:0.964 293:0.965 343:0.976 393:0.979 443:0.986 "
        "493:0.983 543:0.991 593:0.990 643:0.991 693:0.993 743:0.993 793:0.993 843:0.996 893:0.995 943:0.997 "
        "993:0.998",
    ),
)
