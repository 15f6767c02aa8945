# Before every figure: the terminal and what the figures share. draw.py sets `paper` (1: for
# the document, 0: for the README), `output` and `here`. The size of a figure, in
# cm, is for its script to say; so it says `eval open_terminal(width, height)`.
set encoding utf8
set decimalsign '.'
set datafile separator tab
stage_colour = '#2f5d8a'
gap_colour   = '#d1862a'
peer_colour  = '#a9b4bf'
faint        = '#d9dee3'
ink          = '#333333'
phase_colours = '#2f5d8a #d1862a #5a9367 #a23b4a #7b5ea7 #4aa3b5 #8a7a3c #6b6b6b #c77fb0 #1f3b4d'
rgb_of(c) = int('0x'.c[2:])
colour(i) = word(phase_colours, 1 + int(i) % words(phase_colours))
open_terminal(w, h) = paper \
    ? sprintf('set terminal cairolatex pdf input noheader colortext size %gcm,%gcm; set output "%s"', w, h, output) \
    : sprintf('set terminal svg noenhanced dashed size %g,%g font "Helvetica,14" background "#ffffff"; set output "%s"', 58 * w, 58 * h, output)
set border 3 lc rgb ink
set tics nomirror scale 0.5 textcolor rgb ink
unset key
