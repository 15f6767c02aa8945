# A filter between noweb's markup and notangle. Wherever a chunk is used on a line of
# its own, it writes the chunk's name above it as a comment, and it sets what stands at
# the outermost level apart by blank lines, so that a tangled file reads well without
# the document. It adds nothing inside a continued #define, nor to what is used in the
# middle of a line, at any depth.
#
#   -v root=NAME   the chunk that is tangled; one that ends in .py is Python, and
#                  what is used there inside """ is C again

function comment(name, language) {
    gsub(/\[\[|\]\]/, "", name)
    if (language == "py") return "# " name
    return index(name, "*/") ? "" : "/* " name " */"
}

# Notes of each use in chunk `name` whether it stands alone on a line that continues no
# other, what precedes it on its line, and the line before.
function find_lone_uses(name,    i, before, last) {
    before = last = ""
    for (i = 1; i <= lines[name]; i++) {
        if (line[name, i] ~ /^@text /) before = before substr(line[name, i], 7)
        else if (line[name, i] ~ /^@nl/) { last = before; before = "" }
        else if (line[name, i] ~ /^@use /) {
            alone[name, i] = before ~ /^ *$/ && last !~ /\\$/ && line[name, i + 1] ~ /^@nl/
            indent[name, i] = before
            previous[name, i] = last
            before = before "x"
        }
    }
}

# Decides for chunk `name`, and all that it uses, which language its comments take
# ("py", "c", or "" for none), and whether it is at the outermost level.
# Where two users disagree, there are no comments.
function decide(name, language, outermost,    i, rest, quoted, inner) {
    if (name in chosen && chosen[name] != language) language = outermost = ""
    if (name in chosen && chosen[name] == language && outer[name] == outermost) return
    outer[name] = (name in chosen) ? outer[name] && outermost : outermost
    chosen[name] = language
    quoted = 0
    for (i = 1; i <= lines[name]; i++) {
        if (line[name, i] ~ /^@text /) {
            rest = substr(line[name, i], 7)
            while (sub(/"""/, "", rest)) quoted = !quoted
        } else if (line[name, i] ~ /^@use /) {
            inner = language
            if (inner == "py" && quoted) inner = "c"
            if (!alone[name, i]) inner = ""
            decide(substr(line[name, i], 6), inner, outermost && inner != "" && indent[name, i] == "")
        }
    }
}

/^@text $/     { next }   # markup puts one after every use
               { all[++count] = $0 }
/^@begin docs/ { chunk = "" }
/^@defn /      { chunk = substr($0, 7); definitions[chunk]++ }
chunk != ""    { line[chunk, ++lines[chunk]] = $0; here[count] = chunk
                 at[count] = lines[chunk]; nth[count] = definitions[chunk] }

END {
    for (chunk in lines) find_lone_uses(chunk)
    decide(root, root ~ /\.py$/ ? "py" : "c", 1)
    for (n = 1; n <= count; n++) {
        chunk = here[n]
        first = all[n - 1] ~ /^@nl/ && all[n - 2] ~ /^@defn /
        if (outer[chunk] && first && nth[n] > 1) print "@text \n@nl"
        if (all[n] ~ /^@use / && alone[chunk, at[n]] && chosen[chunk] != "") {
            language = chosen[chunk]
            if (language == "py" && chosen[substr(all[n], 6)] == "c") language = "c"
            text = comment(substr(all[n], 6), language)
            if (outer[chunk] && !first && indent[chunk, at[n]] == "" && previous[chunk, at[n]] !~ /^(#(if|el).*)?$/)
                print "@text \n@nl"
            if (text != "") printf "@text %s\n@nl\n@text %s\n", text, indent[chunk, at[n]]
        }
        print all[n]
        if (outer[chunk] && all[n] ~ /^@nl/ && all[n - 1] ~ /^@use / && alone[chunk, at[n - 1]] \
            && indent[chunk, at[n - 1]] == "" && all[n + 1] ~ /^@text [^#]/) print "@text \n@nl"
    }
}
