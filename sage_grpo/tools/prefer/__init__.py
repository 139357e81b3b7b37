"""People in the loop: compare clips blindly in a browser, read the result, learn a reward from the answers.

study.py       what is compared: clips, pairs, questions; the first line of the answers file
pairs.py       which pairs are shown to a rater, in which order and on which sides
sources.py     clips of runs, checkpoints and folders
blinding.py    clips without a trace of where they come from
answers.py     the answers file: appended, synced, locked
server.py      the page's server
statistics.py  win rates with intervals, agreement, how many more pairs
results.py     the page and the JSON of a study
"""
