// A click on a moving picture stops it, another lets it go on.
document.addEventListener("click", event => event.target.closest(".output svg")?.classList.toggle("paused"));
