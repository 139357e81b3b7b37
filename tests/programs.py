"""Programs that are called in this process."""


def exit_code(main, arguments):
    """What a program's `main` returns or exits with."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def flag_list(flags):
    """Words of a command line: `--name value` for each flag."""
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
