"""Attacks on what is proven: random small problems, all of whose plans are enumerated and simulated.

`problems` makes a case from a seed. `rules` says, in code of its own, which plans the options leave; `orders`
which devices their stages may have; `enumeration` simulates every plan that may be below a limit. `checks`
holds what pplan says against that: bounds, exact answers, errors that nothing fits, objectives, frontiers and
explanations. Nothing of `planner.search` is used to enumerate.
"""
