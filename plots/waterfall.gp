# Time above the read limit, stage by stage: what is left inside a CUDA graph, the launch
# gaps above it, and as a shadow how far the stage fell from the one before.
# waterfall.dat: x, us in a graph, us, us of the stage before, tick label, label.
eval open_terminal(15.2, 7.5)
set xrange [-0.6 : count - 0.4]
set yrange [0 : 1.1 * highest]
set xlabel 'stage'
set ylabel 'µs above the read limit'
set xtics scale 0
set label 'fall from the stage before' at graph 0.98, 0.92 right textcolor rgb peer_colour
set label 'launch gaps: gone in a CUDA graph' at graph 0.98, 0.84 right textcolor rgb gap_colour
set label 'the rest: barriers, tails, bandwidth not reached' at graph 0.98, 0.76 right textcolor rgb stage_colour
plot 'waterfall.dat' using 1:4:($1 - 0.36):($1 + 0.36):3:4 with boxxyerror fs solid 1 noborder lc rgb faint, \
     '' using 1:2:($1 - 0.36):($1 + 0.36):(0):2:xtic(5) with boxxyerror fs solid 1 noborder lc rgb stage_colour, \
     '' using 1:3:($1 - 0.36):($1 + 0.36):2:3 with boxxyerror fs solid 1 noborder lc rgb gap_colour, \
     '' using 1:3:6 with labels offset 0, 0.6 textcolor rgb ink
set output
