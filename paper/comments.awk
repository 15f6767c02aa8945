# A filter for noweave: puts the comments of C code between \codecomment and
# \codecommentend, line by line, so that they can be set in grey. It runs after noweb's
# own indexing, which cuts a line of code into several @text records.

function on()  { if (!shown) { print "@literal \\codecomment{}"; shown = 1 } }
function off() { if (shown)  { print "@literal \\codecommentend{}"; shown = 0 } }
function flush_text() { if (piece != "") print "@text " piece; piece = "" }

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
/^@end code/   { off(); code = 0 }
code && /^@nl/ { off(); if (state != "/*") state = ""; print; next }
code && /^@text ./ { if (state == "/*") on(); scan(substr($0, 7)); next }
{ print }
