"""Objectives of a plan: step time, throughput, memory and cost; and the frontier of time and memory."""
