"""The parts of the simulator: costs, dependencies, the engine and the results of a run."""
