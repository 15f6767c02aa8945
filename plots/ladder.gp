# The ladder: us a layer, a bar a stage from 0, in the order of the ladder; then the peers.
# ladder.dat: y, us, p10, p90, tick label, label, 0 for a stage and 1 for a peer.
eval open_terminal(15.2, 2.2 - 0.62 * (lowest - 1))
set xrange [0 : 1.13 * longest]
set yrange [lowest - 0.7 : 0.7]
set tmargin 2.2
set border 1
set tics out
set ytics scale 0
set xtics 400
set xlabel 'µs a layer (at each bar: times its read limit)' offset -6, 0
set arrow from first read_limit, graph 0 to first read_limit, graph 1.02 nohead front lw 2 lc rgb ink
set arrow from first copy_floor, graph 0 to first copy_floor, graph 1.02 nohead front lw 2 lc rgb gap_colour
set label sprintf('read limit %.0f', read_limit) at first read_limit, graph 1.02 right offset -0.3, 0.5 textcolor rgb ink
set label sprintf('copy floor %.0f', copy_floor) at first copy_floor, graph 1.02 left offset 0.3, 0.5 textcolor rgb gap_colour
# A label that would stand on the two lines stands behind them.
behind(us) = us < copy_floor && us > 0.9 * read_limit ? copy_floor : us
hue(kind) = kind > 0 ? rgb_of(peer_colour) : rgb_of(stage_colour)
plot 'ladder.dat' using (0):1:(0):2:($1 - 0.36):($1 + 0.36):(hue($7)):ytic(5) \
         with boxxyerror fs solid 1 noborder lc rgb variable, \
     '' using 3:1:($4 - $3):(0) with vectors heads size 0.08,90 fixed lc rgb ink lw 1, \
     '' using (behind($4)):1:6 with labels left offset 0.8, 0 textcolor rgb ink
set output
