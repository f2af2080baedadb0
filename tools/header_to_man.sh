#!/bin/sh
# Makes the manual page of a header from its comments: header_to_man.sh HEADER NAME VERSION > NAME.3
#
# What it relies on in the header: a comment at the top whose first sentence names the thing; sections that begin with
# a comment of dashes; a comment at column 0 stands above what it explains; deeper indented lines of a comment are shown as
# they are. Function bodies, preprocessor lines and what only serves C++ are left out; the status list becomes a list.
set -eu
[ $# -eq 3 ] || { echo "usage: header_to_man.sh HEADER NAME VERSION" >&2; exit 2; }

awk -v file="$(basename "$1")" -v name="$2" -v version="$3" '
function escape(s) { gsub(/\\/, "\\e", s); gsub(/-/, "\\-", s); if (s ~ /^[.\x27]/) s = "\\\\&" s; return s }
function code_begin() { if (!in_code) { print ".PP\n.EX"; in_code = 1 } }
function code_end() { if (in_code) { print ".EE"; in_code = 0 } }

# Prints the gathered lines of one comment: paragraphs, bullets, and indented lines verbatim.
function flush_comment(   i, s, bullet, verbatim, fresh) {
  fresh = 1
  for (i = 1; i <= comment_lines; i++) {
    s = comment[i]
    if (s ~ /^ *$/) { fresh = 1; bullet = 0; continue }
    if (s ~ /^ *- /) {
      if (verbatim) { print ".EE"; verbatim = 0 }
      sub(/^ *- */, "", s); print ".IP \\(bu 2"; bullet = 1
    } else if (bullet && s ~ /^  /) {
      sub(/^ */, "", s)
    } else if (s ~ /^  /) {
      if (!verbatim) { print ".PP\n.EX"; verbatim = 1 }
      bullet = 0
    } else {
      if (verbatim) { print ".EE"; verbatim = 0; fresh = 1 }
      if (bullet) { bullet = 0; fresh = 1 }
      if (fresh) print ".PP"
    }
    fresh = 0
    print escape(s)
  }
  if (verbatim) print ".EE"
  comment_lines = 0
}

function add_comment(s) {
  sub(/ *\*\/ *$/, "", s); sub(/^\/\* ?/, "", s); sub(/^ \* ?/, "", s)
  comment[++comment_lines] = s
}

NR == 1 {
  title = $0; sub(/^\/\* *[^:]*: */, "", title); sub(/\..*/, "", title)
  print ".\\\" Generated from " file " by tools/header_to_man.sh"
  print ".TH " toupper(name) " 3 \"\" \"qkv " version "\" \"Library functions\""
  print ".SH NAME\n" name " \\- " title
  print ".SH SYNOPSIS\n.B #include <qkv/" file ">\n.PP\nLink with \\fI" (file == "nn.h" ? "\\-lqkv\\-nn \\-lqkv" : "\\-lqkv") "\\fP (\\fBpkg\\-config \\-\\-libs qkv" (file == "nn.h" ? "\\-nn" : "") "\\fP)."
  print ".SH DESCRIPTION"
}
in_comment { add_comment($0); if (/\*\//) { in_comment = 0; flush_comment() } next }
/^#ifdef __cplusplus/ { cplusplus = 1; next }
cplusplus { if (/^#endif/) cplusplus = 0; next }
in_macro || /^#/ {
  # A row of a list macro: X(NAME, number, "text").
  if (match($0, /X\([A-Z0-9_]+, [0-9]+, ".*"\)/)) {
    s = substr($0, RSTART + 2, RLENGTH - 3); split(s, part, ", ")
    text = s; sub(/^[^"]*"/, "", text); sub(/"$/, "", text)
    code_end(); print ".TP\n.BR " escape(part[1]) " \" = " part[2] "\"\n" escape(text)
  }
  in_macro = /\\$/; next
}
/^\/\* ----/ { code_end(); s = $0; sub(/^\/\* -+ */, "", s); sub(/ *-+ *\*\/ *$/, "", s); print ".SH " toupper(escape(s)); next }
/^\/\*/ { code_end(); add_comment($0); if (/\*\//) flush_comment(); else in_comment = 1; next }
in_body { if (/^}/) in_body = 0; next }
/^static inline/ {
  s = $0; sub(/^static inline /, "", s); in_body = s !~ /}$/; sub(/ *\{.*/, ";", s)
  code_begin(); print escape(s); next
}
/^ *$/ { code_end(); next }
/QKV_STATUS_LIST\(/ { held = ""; skip_close = 1; next }
skip_close && /^};/ { skip_close = 0; next }
/^enum \{$/ { held = $0; next }
{
  s = $0; sub(/^QKV_API /, "", s)
  code_begin(); if (held != "") { print escape(held); held = "" }
  print escape(s)
}
END {
  code_end()
  print ".SH SEE ALSO\n.BR qkv (1)" (name == "qkv" ? "" : ",\n.BR qkv (3)")
}' "$1"
