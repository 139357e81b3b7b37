"""One page about a run, or about several.

page         the page of one run, section by section; writes both kinds
comparison   the page that compares several runs with the first
figures      every figure with its caption
drawing      how curves, maps and stacks become SVG
settings     what differs between the configurations of runs
templates    HTML and CSS, also those of the page of sage_grpo.tools.evaluate
"""
