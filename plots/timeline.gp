# SM by time, coloured by phase; stage 6 above stage 7 where both were recorded.
# panelN.dat: sm, start, end in us, colour; panelN-names.dat: us, name, colour, line. A phase
# has the same colour in both panels.
eval open_terminal(15.2, 1.2 + 5.8 * panels)
set multiplot layout panels, 1
set xrange [0 : longest]
set border 3
set datafile separator whitespace
set bmargin 3
set tmargin 2.2
set lmargin 9
do for [panel = 1:panels] {
    set ylabel value(sprintf('title%d', panel))
    set xlabel (panel == panels ? 'µs' : '')
    sms = value(sprintf('sms%d', panel))
    set ytics 0, 40, sms
    set yrange [-0.5 : 1.36 * sms]
    rows = sprintf('panel%d.dat', panel)
    names = sprintf('panel%d-names.dat', panel)
    plot rows using 2:1:2:3:($1 - 0.75):($1 + 0.75):(rgb_of(colour($4))) \
             with boxxyerror fs solid 1 noborder lc rgb variable, \
         names using ($1 < 0.07 * longest ? 0.07 * longest : $1):(sms * (1.06 + 0.11 * $4)):2:(rgb_of(colour($3))) with labels textcolor rgb variable
}
unset multiplot
set output
