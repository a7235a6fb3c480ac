// A click on a moving picture is a click on its button: it stops, and goes on.
document.addEventListener("click", event => event.target.closest("figure.motion svg")?.parentNode.querySelector("button").click());
