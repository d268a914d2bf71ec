"""The review pack: everything the kit can say of one model and its traffic, on one page."""

from mambackpt.review.pack import Review, build_review
from mambackpt.review.question import Question

__all__ = ["Question", "Review", "build_review"]
