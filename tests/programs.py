"""Programs that are called in this process."""


def exit_code(main, arguments):
    """What a program's `main` returns or exits with."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
