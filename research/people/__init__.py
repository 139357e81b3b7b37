"""The whole loop of people in the loop on the embedded world, with simulated raters."""
