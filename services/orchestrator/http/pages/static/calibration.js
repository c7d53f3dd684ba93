// The calibration of Q_t, measured when asked for.
import { ask, draw } from "./plots.js";

const job = document.getElementById("calibration").dataset.job;
const says = document.getElementById("calibration-says");
const button = document.getElementById("calibrate");

function figures(found) {
  const words = [
    `weights ${found.policy_version}`,
    `${found.prefixes} prefixes`,
    `calibration error ${found.expected_calibration_error.toFixed(3)}`,
    `Brier score ${found.brier_score.toFixed(3)}`,
    `of Q̂₀ alone ${found.brier_score_of_qhat_0.toFixed(3)}`,
  ];
  document.getElementById("calibration-figures").replaceChildren(...words.map((text) => {
    const place = document.createElement("span");
    place.textContent = text;
    return place;
  }));
}

button.addEventListener("click", async () => {
  button.disabled = true;
  says.textContent = "Value-estimation measures…";
  try {
    const found = await ask(`/v1/jobs/${job}/calibration`);
    const bins = found.bins.toSorted((a, b) => a.predicted - b.predicted);
    const column = (name) => bins.map((bin) => bin[name]);
    figures(found);
    if (!bins.length) throw new Error("there are no stored samples to compare with yet");
    document.getElementById("curve-calibration").hidden = false;
    draw("curve-calibration", column("predicted"), [
      { label: "observed", values: column("observed"), dots: true, colour: "--c1" },
      { label: "low", values: column("low"), thin: true, colour: "--c1" },
      { label: "high", values: column("high"), thin: true, colour: "--c1" },
      { label: "perfect", values: column("predicted"), dashed: true, colour: "--faint" },
    ], { axis: "predicted", bands: [{ series: [3, 2], of: "--c1" }], range: [0, 1], height: 300 });
    says.textContent = "Above the diagonal pi0 succeeds more often than Q_t predicts.";
  } catch (failure) {
    says.textContent = `Not to be had: ${failure.message}`;
  } finally {
    button.disabled = false;
  }
});
