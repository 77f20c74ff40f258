// Only for convenience: the page is complete without scripts.
(() => {
  // Pointing at a rule (in the head of a table, a cell or the legend) highlights its lines in all figures.
  const lines = document.querySelectorAll(".plot .line");
  const show = (rule) => lines.forEach((line) => {
    line.style.opacity = rule === null || line.classList.contains(`rule-${rule}`) ? "" : "0.12";
  });
  document.querySelectorAll(".results [data-rule], .legend [data-rule]").forEach((item) => {
    for (const on of ["mouseenter", "focus"]) item.addEventListener(on, () => show(item.dataset.rule));
    for (const off of ["mouseleave", "blur"]) item.addEventListener(off, () => show(null));
  });
  document.querySelectorAll(".copy").forEach((button) => {
    if (!navigator.clipboard) return;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  });
})();
