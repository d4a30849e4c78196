// Only what pymdownx.arithmatex marks is an equation; other dollar signs are dollar signs.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
