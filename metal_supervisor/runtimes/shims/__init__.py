"""Wrappers of engines that need one: a gate, or a server limited to one model. Other interpreters run some of them."""
