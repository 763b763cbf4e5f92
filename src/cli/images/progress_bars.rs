//! Progress output of image orders: a bar per layer on a terminal, else a line per finished layer.

use std::io::IsTerminal;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::table;
use berth_runtime::images::progress::{LayerProgress, Stage};

/// Displayed hexadecimal digits of a digest.
const SHORT: usize = 12;
const BAR: &str = "{prefix} {bar:24} {bytes:>10} of {total_bytes:<10} {msg}";
const WORDS: &str = "{prefix} {msg}";

/// Kind of output.
enum ProgressOutput {
    Nowhere,
    Lines,
    Bars(MultiProgress),
}

/// Progress output and the last stage of each layer.
pub(super) struct ProgressBars {
    form: ProgressOutput,
    layers: Vec<(ProgressBar, Option<Stage>)>,
}

impl ProgressBars {
    pub(super) fn new(quiet: bool) -> Self {
        let form = match quiet {
            true => ProgressOutput::Nowhere,
            false if std::io::stderr().is_terminal() => {
                ProgressOutput::Bars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))
            }
            false => ProgressOutput::Lines,
        };
        Self { form, layers: Vec::new() }
    }

    pub(super) fn show(&mut self, layers: &[LayerProgress]) {
        for (at, layer) in layers.iter().enumerate() {
            if at == self.layers.len() {
                self.layers.push((self.bar(layer), None));
            }
            let Some((bar, stage)) = self.layers.get_mut(at) else { continue };
            let is_new = *stage != Some(layer.stage);
            *stage = Some(layer.stage);
            match self.form {
                ProgressOutput::Nowhere => {}
                ProgressOutput::Lines if is_new && layer.stage == Stage::Done => {
                    eprintln!("{}: done ({})", short(layer), table::size(layer.size));
                }
                ProgressOutput::Lines => {}
                ProgressOutput::Bars(_) => {
                    if is_new {
                        bar.set_style(style(layer.stage));
                        bar.set_message(word(layer.stage));
                    }
                    bar.set_position(layer.done);
                    if is_new && layer.stage == Stage::Done {
                        bar.abandon();
                    }
                }
            }
        }
    }

    fn bar(&self, layer: &LayerProgress) -> ProgressBar {
        let ProgressOutput::Bars(all) = &self.form else { return ProgressBar::hidden() };
        all.add(ProgressBar::new(layer.size)).with_prefix(short(layer)).with_style(style(layer.stage))
    }

    /// Ends all bars at their current position.
    pub(super) fn end(&mut self) {
        self.layers.iter().for_each(|(bar, _)| bar.abandon());
    }
}

fn short(layer: &LayerProgress) -> String {
    layer.digest.hex().chars().take(SHORT).collect()
}

fn style(stage: Stage) -> ProgressStyle {
    let template = if matches!(stage, Stage::Waiting | Stage::Done) { WORDS } else { BAR };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ")
}

fn word(stage: Stage) -> &'static str {
    match stage {
        Stage::Waiting => "waiting",
        Stage::Downloading => "downloading",
        Stage::Unpacking => "unpacking",
        Stage::Writing => "writing",
        Stage::Checking => "checking",
        Stage::Done => "done",
    }
}
