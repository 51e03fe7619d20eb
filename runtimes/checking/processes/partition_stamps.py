"""When the stages of torchgpipe and FairScale compute: hooks on their partitions.

The forward of a stage is what its module takes. Its backward lies between the gradients of its output and of
its input: both pass an identity of ours. Where the input wants no gradient, as the first stage's, the last
gradient of a parameter ends it. A forward while the backward is under way is one that runs again.
"""

from __future__ import annotations
