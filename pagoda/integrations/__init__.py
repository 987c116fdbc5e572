"""Pagoda inside other people's training loops. Nothing here is imported before a user does.

`pagoda.integrations.transformers`, `.accelerate` and `.lightning` each import the package they are named after.
"""

from pagoda.integrations.paging import Paging as Paging

__all__ = ["Paging"]
