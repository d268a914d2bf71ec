"""The review pack: everything the kit can say of one model and its traffic, on one page."""

from mambackpt.review.pack import Review, build_review
from mambackpt.review.question import Question
from mambackpt.review.show import PARTS, part_of, show_part

__all__ = ["PARTS", "Question", "Review", "build_review", "part_of", "show_part"]
