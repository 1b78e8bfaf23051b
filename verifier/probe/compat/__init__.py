"""The only home of private names of torch: `names` is the table, the other modules are what the probe does with them."""
