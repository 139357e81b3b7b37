"""How the report page looks: one style sheet, light, from phone to wide screen."""

CSS = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --faint: #7b8794; --line: #e1e6eb; --paper: #f6f7f9;
  --good: #2f7d57; --bad: #b4433a; --accent: #2f6690; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3rem 0 .3rem; }
h3 { font-size: .95rem; margin: 0 0 .4rem; }
p { margin: .3rem 0 .9rem; max-width: 56rem; }
.summary { font-size: 1.1rem; max-width: 62rem; }
.facts, .intro { color: var(--soft); font-size: .93rem; }
.facts { max-width: none; }
pre { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .75rem .9rem; margin: .4rem 0 .9rem;
  font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.command { user-select: all; border-left: 3px solid var(--accent); }
summary { cursor: pointer; color: var(--soft); font-size: .93rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(165px, 46%), 1fr)); gap: .75rem;
  margin: 1.2rem 0; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .65rem .8rem; }
.tile b { display: block; font-size: 1.04rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: .8rem; }
.panels, .cards { display: grid; gap: 1rem; margin-top: .9rem; align-items: stretch;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.panels.maps { grid-template-columns: repeat(auto-fill, minmax(min(460px, 100%), 1fr)); }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .85rem .9rem .8rem;
  min-width: 0; }
figure.wide { grid-column: span 2; }
figure svg, figure img { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .84rem; line-height: 1.4; margin-top: .45rem; max-width: 40rem; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .3rem .9rem;
  margin: .9rem 0 .5rem; }
figure .scroll { border: 0; padding: 0; margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .42rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
th { color: var(--faint); font-weight: 500; font-size: .82rem; }
small { color: var(--faint); }
.good { color: var(--good); } .bad { color: var(--bad); }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em; }
.card h3 { font-weight: 500; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; font-size: .8rem; }
.pair > div { min-width: 0; }
.pair b { font-variant-numeric: tabular-nums; }
video { display: block; width: 100%; border-radius: 6px; border: 1px solid var(--line); margin-bottom: .35rem; }
video.small { image-rendering: pixelated; }
@media (min-width: 781px) { figure.wide svg text { font-size: 7px !important; } }
@media (max-width: 780px) { figure.wide { grid-column: auto; } main { padding: 1.5rem .8rem 3rem; }
  h1 { font-size: 1.5rem; } h2 { margin-top: 2.2rem; } .summary { font-size: 1.02rem; }
  td small { display: block; } td:first-child { white-space: normal; } }
"""
