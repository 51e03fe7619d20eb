"""What things cost: layers, links, memory, schedules and the simulator. Knows no torch and no search."""
