# Microseconds of a layer against its bytes, for several layers; the read limit, and the same line
# higher by what a layer of 4096 keys takes above it, by the median.
# shapes.dat: MB a step, us, label, 1 for a cache that is not of 4096 keys.
eval open_terminal(15.2, 8.5)
set xrange [0 : 1.22 * most]
set yrange [0 : *]
set xlabel 'MB a step'
set ylabel 'µs a layer'
set label 'read limit' at first 0.66 * most, first 0.66 * most / read_tbs - 45 left textcolor rgb peer_colour
set label sprintf('and %.0f µs', above) at first 0.42 * most, first 0.42 * most / read_tbs + above + 30 right textcolor rgb stage_colour
plot x / read_tbs with lines lw 2 lc rgb peer_colour, \
     x / read_tbs + above with lines lw 1 dt 2 lc rgb stage_colour, \
     'shapes.dat' using 1:($4 == 0 ? $2 : NaN) with points pt 7 ps 0.6 lc rgb gap_colour, \
     '' using 1:($4 == 1 ? $2 : NaN) with points pt 6 ps 0.7 lc rgb gap_colour, \
     '' using ($1 > 0.15 * most && $4 == 0 ? $1 : NaN):2:3 with labels right offset -1, 0.3 textcolor rgb ink, \
     '' using ($1 > 0.15 * most && $4 == 1 ? $1 : NaN):2:3 with labels right offset -1, 0.8 textcolor rgb ink, \
     '' using ($1 > 0.15 * most ? NaN : $1):2:3 with labels left offset 1.2, -1.1 textcolor rgb ink
set output
