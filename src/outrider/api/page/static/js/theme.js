// Runs before the page is painted: a stored choice of light or dark must not flash.
document.documentElement.dataset.theme = localStorage.getItem("theme") || "";
