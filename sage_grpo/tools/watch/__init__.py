"""Follow running jobs in a browser.

__main__.py    the program
state.py       what the page shows, read from run folders
server.py      the page's endpoints; local_page.py keeps everybody else out
"""
