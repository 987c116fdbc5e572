"""Pagoda in the training loops of other libraries. None of these modules is imported before it is used.

`pagoda.integrations.transformers`, `.accelerate` and `.lightning` each import the package of the same name.
"""

from pagoda.integrations.paging import Paging as Paging

__all__ = ["Paging"]
