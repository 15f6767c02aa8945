# A filter for noweave: puts the comments of C code between \codecomment and
# \codecommentend, line by line, so that they can be set in grey. It runs after noweb's
# own indexing, which cuts a line of code into several @text records. And it puts a
# \lastlines before the end of a chunk, so that no page begins with a lone brace.

function say(s) { if (code) held[++holds] = s; else print s }
function release(    i, ends, from) {
    for (i = holds; i > 0 && !from; i--) if (held[i] ~ /^@nl/ && ++ends == 3) from = i
    for (i = 1; i <= holds; i++) {
        if (i == from) print "@literal \\lastlines{}"
        print held[i]
    }
    holds = 0
}
function on()  { if (!shown) { say("@literal \\codecomment{}"); shown = 1 } }
function off() { if (shown)  { say("@literal \\codecommentend{}"); shown = 0 } }
function flush_text() { if (piece != "") say("@text " piece); piece = "" }

function scan(s,    i, c, two) {
    piece = ""
    for (i = 1; i <= length(s); i++) {
        c = substr(s, i, 1); two = substr(s, i, 2)
        if (state == "" && (two == "/*" || two == "//")) {
            flush_text(); state = two; on(); piece = two; i++
        } else if (state == "/*" && two == "*/") {
            piece = piece two; i++; flush_text(); off(); state = ""
        } else {
            if (state == "" && (c == "\"" || c == "'")) state = c
            else if (state == c) state = ""
            else if ((state == "\"" || state == "'") && c == "\\") { piece = piece c; i++; c = substr(s, i, 1) }
            piece = piece c
        }
    }
    flush_text()
}

/^@begin code/ { code = 1; state = "" }
/^@end code/   { off(); release(); code = 0 }
code && /^@nl/ { off(); if (state != "/*") state = ""; say($0); next }
code && /^@text ./ { if (state == "/*") on(); scan(substr($0, 7)); next }
{ say($0) }
