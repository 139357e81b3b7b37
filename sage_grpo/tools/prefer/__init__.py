"""People in the loop: compare clips blindly in a browser, read the result, learn a reward from the answers.

label     label.py       makes or continues a study, and serves its page
          study.py       what is compared: clips, pairs, questions; the first line of the answers file
          sources.py     clips of runs, checkpoints and folders
          blinding.py    clips without a trace of where they come from
          pairs.py       which pairs are compared, and what a rater is shown: order and sides
          answers.py     the answers file: appended, synced, locked
          server.py      the page's server
result    results.py     the page and the JSON of a study
          statistics.py  win rates with intervals, agreement, how many more pairs
learn     learn.py       answers to comparisons, held-out prompts, the folder that is written
          heads.py       the fit of the reward heads
          lora.py        the fit of an adapter with its reward heads
          study_clips.py the study's clips, prepared for the reward model
"""
