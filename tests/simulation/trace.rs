//! Trace of a run: printed completely on failure, and live on replay.

use std::hash::{DefaultHasher, Hash, Hasher};

use tokio::time::Instant;
use tracing_subscriber::fmt::{format::Writer, time::FormatTime};

use berth_testkit::scripted_cri::ScriptedCri;

/// Steps of the script, with times.
pub struct Trace {
    start: Instant,
    lines: Vec<(u128, String)>,
}

impl Trace {
    /// Starts now.
    pub fn new() -> Self {
        Self { start: Instant::now(), lines: Vec::new() }
    }

    /// Records a step of the script.
    pub fn note(&mut self, line: String) {
        tracing::info!(target: "script", "━━ {line}");
        self.lines.push((self.start.elapsed().as_micros(), format!("━━ {line}")));
    }

    /// The script's steps, the calls, and their results, in order of time.
    pub fn all(&self, cri: &ScriptedCri) -> String {
        let mut lines = self.lines.clone();
        for call in cri.calls() {
            let at = call.at.saturating_duration_since(self.start).as_micros();
            lines.push((at, format!("   call {} {} {}", call.op, call.target, short(&call.detail))));
        }
        for moment in cri.history().0 {
            let at = moment.at.saturating_duration_since(self.start).as_micros();
            lines.push((at, format!("        {:?}", moment.fact)));
        }
        lines.sort_by_key(|(at, _)| *at);
        let read_only =
            ["call list_", "call container_status", "call podsandbox_status", "call status", "call image_status"];
        let changes = lines.iter().filter(|(_, line)| !read_only.iter().any(|call| line.contains(call)));
        changes.map(|(at, line)| format!("{:>11.3} {}\n", *at as f64 / 1e6, ids(line))).collect()
    }

    /// A hash of the trace: different for different runs.
    pub fn fingerprint(&self, cri: &ScriptedCri) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (at, line) in &self.lines {
            (at, line).hash(&mut hasher);
        }
        for call in cri.calls() {
            let at = call.at.saturating_duration_since(self.start).as_nanos();
            (at, call.op, call.target, call.detail).hash(&mut hasher);
        }
        hasher.finish()
    }
}

fn short(text: &str) -> &str {
    text.get(..40).unwrap_or(text)
}

/// Shortens ids by their leading zeros.
fn ids(line: &str) -> String {
    let zeros = "0".repeat(52);
    line.replace(&zeros, "…")
}

struct Virtual(Instant);

impl FormatTime for Virtual {
    fn format_time(&self, w: &mut Writer<'_>) -> std::fmt::Result {
        write!(w, "{:>11.3}", self.0.elapsed().as_secs_f64())
    }
}

/// Writes the logs of this thread to stdout, with virtual times, until the guard is dropped.
pub fn to_stdout() -> tracing::subscriber::DefaultGuard {
    let log = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_timer(Virtual(Instant::now()))
        .with_ansi(false)
        .with_writer(std::io::stdout);
    tracing::subscriber::set_default(log.finish())
}
