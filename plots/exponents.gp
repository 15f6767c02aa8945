# Which exponents weights have, by their place relative to the window of sixteen, which is shaded.
# exponents.dat: place, then the share of each kind of weights, NaN for none.
eval open_terminal(13, 7)
set logscale y
set xrange [-12.5 : 21.5]
set yrange [1e-8 : 1]
set format y '%.0e'
set xtics 4
set xlabel 'exponent, counted from the first of the window'
set ylabel 'share of the weights'
set object 1 rectangle from first -0.5, graph 0 to first 15.5, graph 1 behind fillcolor rgb faint fillstyle solid 1 noborder
set key left top reverse Left textcolor rgb ink samplen 1.5
plot for [i = 1 : kinds] 'exponents.dat' using 1:(column(i + 1)) with linespoints pt 7 ps 0.4 lw 1.5 \
    lc rgb colour(i - 1) title word(names, i)
set output
