# The roofline: FLOP per byte of HBM against TFLOP/s, both logarithmic. Solid ceilings were
# measured in the run, thin dashed ones are the datasheet's (0: not known for this GPU).
# roofline.dat: FLOP per byte, TFLOP/s, label.
eval open_terminal(11.5, 7.5)
set logscale xy
set xrange [0.1 : 2000]
set yrange [0.1 : 2000]
set format xy '%g'
set xlabel 'FLOP per byte of HBM'
set ylabel 'TFLOP/s'
roof(x, tbs) = sheet_tflops > 0 && tbs * x > sheet_tflops ? NaN : tbs * x
set samples 400
set label sprintf('read-only %.2f TB/s', read_tbs) at first 14, first 24 left textcolor rgb stage_colour
set label sprintf('copy %.2f TB/s', copy_tbs) at first 14, first 11 left textcolor rgb peer_colour
set label 'measured in the run' at first 14, first 5 left textcolor rgb ink
if (sheet_tflops > 0) {
    set label sprintf('datasheet: %.1f TB/s, %.0f TFLOP/s', sheet_tbs, sheet_tflops) \
        at first sheet_tflops / sheet_tbs, first sheet_tflops right offset -1, 0.5 textcolor rgb ink
}
plot (sheet_tbs > 0 ? roof(x, sheet_tbs) : NaN) with lines lw 0.7 dt 2 lc rgb ink, \
     (sheet_tflops > 0 && x > sheet_tflops / sheet_tbs ? sheet_tflops : NaN) with lines lw 0.7 dt 2 lc rgb ink, \
     roof(x, read_tbs) with lines lw 2 lc rgb stage_colour, \
     roof(x, copy_tbs) with lines lw 2 lc rgb peer_colour, \
     'roofline.dat' using 1:2 with points pt 7 ps 0.6 lc rgb gap_colour, \
     '' using 1:2:3 with labels left offset 1.2, 0 textcolor rgb gap_colour
set output
