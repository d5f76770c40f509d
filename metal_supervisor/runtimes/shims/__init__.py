"""Programs around engines that need one: a gate, or a server held to one model. Other interpreters run some of them."""
