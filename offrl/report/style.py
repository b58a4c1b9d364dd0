"""The look of `offrl.report.page`'s pages: colours for light and dark, the style sheet, and the few lines that sort
tables and print.
"""

from __future__ import annotations

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif".replace("'", "")

# Colours of offrl.figures.curves and the variables that stand for them in a page.
THEMED = {
    "#0072b2": "--c0",
    "#d55e00": "--c1",
    "#009e73": "--c2",
    "#cc79a7": "--c3",
    "#56b4e9": "--c4",
    "#e69f00": "--c5",
    "#444444": "--c6",
    "#882255": "--c7",
    "#999933": "--c8",
    "#332288": "--c9",
    "#aa4499": "--c10",
    "#661100": "--c11",
    "#44aa99": "--c12",
    "#808080": "--c13",
    "#666666": "--soft",
    "#333333": "--ink",
    "#000000": "--ink",
    "#aaaaaa": "--axis",
    "#e6e6e6": "--grid",
}

LIGHT = (
    "--bg:#fff;--ink:#1b1f24;--soft:#5a6472;--line:#dde2e8;--panel:#f6f8fa;--link:#0b5cad;--axis:#aab2bc;--grid:#e6e9ed;"
    "--warn:#fff7e0;--warnline:#d39e00;--badbg:#fdeceb;--badline:#c9382c;--goodbg:#e8f6ee;--goodline:#2c8a57;--notebg:#eef4fb;--noteline:#4c87c7;"
    "--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#3d9fd6;--c5:#d48f00;--c6:#444;"
    "--c7:#882255;--c8:#8a8a22;--c9:#332288;--c10:#aa4499;--c11:#661100;--c12:#3a9a8a;--c13:#808080"
)
DARK = (
    "--bg:#15181c;--ink:#e4e7eb;--soft:#9aa4b1;--line:#30363d;--panel:#1c2127;--link:#79b8ff;--axis:#59626d;--grid:#2a3037;"
    "--warn:#2e2610;--warnline:#d9a520;--badbg:#351b1a;--badline:#e5695e;--goodbg:#14291e;--goodline:#4bb37c;--notebg:#172433;--noteline:#5b9bdc;"
    "--c0:#4ba3e3;--c1:#f28b46;--c2:#2fc99a;--c3:#e19cc3;--c4:#8fd0f5;--c5:#f2b93b;--c6:#b9c0c8;"
    "--c7:#d873a4;--c8:#c9c957;--c9:#9d92e8;--c10:#de86d4;--c11:#c98b6e;--c12:#6fd6c4;--c13:#8d959e"
)

STYLE = f"""
*{{box-sizing:border-box}}
html{{scroll-behavior:smooth;-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 {FONT}}}
main{{max-width:1080px;margin:0 auto;padding:2.2rem 1.4rem 5rem}}
h1{{font-size:1.85rem;line-height:1.2;letter-spacing:-.015em;margin:0 0 .3rem}}
h2{{font-size:1.3rem;line-height:1.3;margin:2.8rem 0 .7rem;padding-top:.9rem;border-top:1px solid var(--line)}}
h3{{font-size:1.06rem;margin:1.8rem 0 .5rem}}
h1,h2,h3,li,p,summary,figcaption{{overflow-wrap:anywhere}}
p{{margin:.5rem 0 .9rem;max-width:52rem}}
.subtitle,.small,figcaption,.notes,small{{color:var(--soft)}}
.subtitle{{margin:0 0 1.4rem}}
.small{{font-size:.875rem}}
.lead{{font-size:1.1rem;line-height:1.5}}
a{{color:var(--link)}}
ul{{padding-left:1.2rem;margin:.4rem 0 .9rem;max-width:60rem}}
nav ul{{list-style:none;padding:0;margin:0}}
nav a{{color:var(--soft);text-decoration:none;display:block;padding:.16rem 0;overflow-wrap:anywhere}}
nav a:hover{{color:var(--link)}}
nav{{font-size:.875rem;line-height:1.35;max-width:1080px;margin:0 auto;padding:1.2rem 1.4rem 0}}
nav .l3{{padding-left:.9rem}}
@media (min-width:1420px){{
nav{{position:fixed;top:0;left:max(1rem,calc(50vw - 780px));width:13.4rem;max-height:100vh;overflow:auto;padding:2.6rem 0 2rem}}}}
@media (max-width:1419px){{nav ul{{display:flex;flex-wrap:wrap;gap:.1rem 1.5rem}}nav .l3{{display:none}}
main nav{{padding:.55rem 0;margin-top:1.6rem;border-top:1px solid var(--line)}}main nav+*{{margin-top:1.4rem}}main nav+h2{{margin-top:0}}}}
.answer{{margin:0 0 1.6rem;min-width:0}}
.verdict{{font-size:1.06rem;line-height:1.45;margin:.2rem 0 .5rem;max-width:none;font-weight:600}}
.verdict.first{{font-size:1.38rem;line-height:1.35;letter-spacing:-.01em;margin-top:.6rem}}
.sure{{border-left:4px solid var(--noteline);background:var(--notebg);border-radius:0 6px 6px 0;padding:.4rem .8rem;
margin:.3rem 0 1rem;max-width:none}}
.sure.warning{{border-color:var(--warnline);background:var(--warn)}}
.sure.bad{{border-color:var(--badline);background:var(--badbg)}}
.sure.good{{border-color:var(--goodline);background:var(--goodbg)}}
.whiskers{{width:100%;table-layout:auto;margin:.4rem 0 .6rem}}
.whiskers caption{{caption-side:top;text-align:left;color:var(--soft);font-size:.875rem;line-height:1.45;padding-bottom:.45rem}}
.whiskers th,.whiskers td{{border:0;padding:0 .7rem 0 0;vertical-align:middle;position:static;background:none}}
.whiskers thead th{{font-size:.8rem;font-weight:400;color:var(--soft);padding-bottom:.2rem}}
.whiskers tbody th{{font-weight:600;min-width:5.2rem;max-width:16rem}}
.whiskers td:last-child{{white-space:nowrap;padding-right:0;max-width:none}}
.whiskers td.why{{white-space:normal;color:var(--soft);padding:.35rem 0}}
.whiskers .axis td{{vertical-align:top;height:26px}}
.whiskers .track{{width:60%;padding:0 .9rem 0 .2rem;max-width:none}}
.whiskers .track svg{{display:block;overflow:visible}}
.whiskers small{{display:inline;margin-left:.3rem}}
.whiskers .soft th,.whiskers .soft td,.whiskers th.soft{{color:var(--soft);font-weight:400}}
.whiskers .soft th{{white-space:nowrap}}
.whiskers text{{fill:var(--soft);font-size:12px}}
.whiskers .grid{{stroke:var(--grid)}}.whiskers .mean{{stroke:var(--soft);stroke-dasharray:5 4;stroke-width:1.4}}
.whiskers .whisker{{stroke-width:2.4}}.whiskers .diamond{{fill:var(--bg);stroke:var(--ink);stroke-width:1.6}}
video{{display:block;width:100%;max-width:640px;height:auto;background:#000;border-radius:4px}}
pre,code{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
code{{font-size:.85em;overflow-wrap:anywhere}}
:focus-visible{{outline:2px solid var(--link);outline-offset:2px}}
.box{{border-left:4px solid var(--noteline);background:var(--notebg);padding:.75rem 1rem;margin:1.1rem 0;border-radius:0 6px 6px 0}}
.box ul{{margin:.3rem 0 0}}
.box.warning{{border-color:var(--warnline);background:var(--warn)}}
.box.bad{{border-color:var(--badline);background:var(--badbg)}}
.box.good{{border-color:var(--goodline);background:var(--goodbg)}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:separate;border-spacing:0;font-size:.925rem;margin:.6rem 0 .5rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.42rem .85rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}}
thead th{{border-bottom:2px solid var(--axis);font-weight:600;vertical-align:bottom}}
tbody th{{font-weight:500;min-width:6rem;max-width:22rem;overflow-wrap:break-word}}
th:first-child{{position:sticky;left:0;background:var(--bg);z-index:1;padding-left:.2rem}}
.n{{text-align:right}}
td{{max-width:30rem;overflow-wrap:break-word}}
td.n.warning,td.n.bad{{max-width:13rem}}
td small,th small{{display:block;font-size:.8rem;line-height:1.35;font-weight:400}}
sup{{font-size:.68rem;line-height:0;margin-left:.12rem;color:var(--soft)}}
tbody tr:hover td,tbody tr:hover th{{background:var(--panel)}}
td.warning{{background:var(--warn)}}td.bad{{background:var(--badbg)}}td.good{{background:var(--goodbg)}}td.note{{background:var(--notebg)}}
.notes{{font-size:.83rem;line-height:1.45;margin:.2rem 0 1.2rem;padding-left:1.4rem;max-width:60rem;overflow-wrap:anywhere}}
figure{{margin:1.1rem 0 1.6rem}}
figure svg text{{fill:var(--ink)}}
figure svg,figure img{{display:block;max-width:100%;height:auto}}
.scroll .wide{{max-width:none;width:100%;min-width:580px}}
@media (min-width:700px){{.scroll .wide{{max-width:100%;width:auto}}}}
figure img{{background:#fff;border-radius:4px}}
figcaption{{font-size:.875rem;line-height:1.45;margin-top:.35rem;max-width:52rem}}
.gallery{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:.4rem 1.8rem}}
.gallery.small{{grid-template-columns:repeat(auto-fill,minmax(min(100%,310px),1fr))}}
.gallery figure{{margin:.5rem 0;min-width:0}}
.gallery figure svg{{width:100%}}
.legend{{display:flex;flex-wrap:wrap;gap:.2rem 1.3rem;font-size:.9rem}}
.legend i{{display:inline-block;width:1.4em;height:.28em;border-radius:2px;margin-right:.45em;vertical-align:middle}}
details{{border:1px solid var(--line);border-radius:6px;padding:.55rem .9rem;margin:.8rem 0}}
summary{{cursor:pointer;font-weight:500}}
details[open]>summary{{margin-bottom:.6rem}}
pre{{background:var(--panel);padding:.8rem 1rem;border-radius:6px;overflow-x:auto;font-size:.83rem;line-height:1.45}}
table.js thead th{{cursor:pointer}}
th[aria-sort=ascending]::after{{content:" \\2191"}}th[aria-sort=descending]::after{{content:" \\2193"}}
@media (max-width:620px){{body{{font-size:15px}}main{{padding:1.4rem .9rem 3rem}}nav{{padding:1rem .9rem 0}}th,td{{padding:.38rem .55rem}}
tbody th{{min-width:6.2rem;max-width:9.5rem}}.verdict.first{{font-size:1.2rem}}
.whiskers tbody th{{min-width:4.4rem;max-width:7rem}}.whiskers td:last-child{{white-space:normal}}.whiskers small{{display:block;margin:0}}
.whiskers .track{{width:50%}}.whiskers tr:not(.axis) .track svg{{height:46px}}.whiskers small{{white-space:nowrap}}}}
@page{{margin:14mm 12mm}}
@media print{{:root{{{LIGHT};color-scheme:light}}nav,script,video{{display:none}}main{{max-width:none;padding:0}}
body{{font-size:10pt;background:none}}
.scroll{{overflow:visible}}.scroll .wide{{min-width:0;max-width:100%}}th:first-child{{position:static}}
table{{font-size:8.5pt}}th,td{{padding:.25rem .5rem}}.broad table{{font-size:6.8pt}}.broad th,.broad td{{padding:.2rem .25rem;min-width:0}}
td small,th small{{font-size:.88em}}.gallery.small figure{{width:31%}}
.sure,.box,td{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}a{{color:inherit;text-decoration:none}}
figure,tr,.box,.answer,.sure,pre{{break-inside:avoid}}h2,h3,.notes+h3,caption,.small:has(+.scroll){{break-after:avoid}}thead{{display:table-header-group}}
h2{{margin-top:1.6rem}}
.gallery{{display:block}}.gallery figure{{display:inline-block;width:48%;vertical-align:top}}
details{{border:0;padding:0}}summary{{list-style:none}}details:not([open])::details-content{{content-visibility:visible;height:auto}}}}
"""  # noqa: E501

SCRIPT = """let shut=[];
addEventListener('beforeprint',()=>{shut=[...document.querySelectorAll('details:not([open])')];shut.forEach(d=>d.open=true)});
addEventListener('afterprint',()=>shut.forEach(d=>d.open=false));
document.querySelectorAll('table.sortable').forEach(t=>{t.classList.add('js');const b=t.tBodies[0];
t.querySelectorAll('thead th').forEach((h,i)=>{h.tabIndex=0;
h.addEventListener('keydown',e=>{if(e.key==='Enter'||e.key===' '){e.preventDefault();h.click()}});
h.addEventListener('click',()=>{const up=h.getAttribute('aria-sort')!=='ascending';
t.querySelectorAll('thead th').forEach(o=>o.removeAttribute('aria-sort'));h.setAttribute('aria-sort',up?'ascending':'descending');
const key=r=>{const c=r.cells[i];return c.dataset.v!==undefined?+c.dataset.v:c.textContent.trim()};
[...b.rows].sort((x,y)=>{const a=key(x),c=key(y),n=typeof a==='number',m=typeof c==='number';
return n!==m?(n?-1:1):(n?a-c:a.localeCompare(c))*(up?1:-1)}).forEach(r=>b.appendChild(r))})})});"""  # noqa: E501


def themed(text: str) -> str:
    """Known colours replaced by the variables of the style sheet."""
    for colour, variable in THEMED.items():
        text = text.replace(colour, f"var({variable})")
    return text
