//! Results table: one row per figure with a cell per binary, the raw runtime, the bar, and a verdict.

use crate::figures::{Bar, Figure, Samples};

/// Results of one measurement.
pub struct MeasurementResults {
    /// Figures of the measurement.
    pub figures: &'static [Figure],
    /// Samples of the agent, of the other binary, and of the plain CRI client; or the error.
    pub agent: Result<Samples, String>,
    pub other: Option<Result<Samples, String>>,
    pub raw: Option<Result<Samples, String>>,
}

const HEAD: [&str; 7] = ["measure", "agent", "other", "agent/other", "raw", "bar", ""];

/// Prints all rows as a Markdown table.
pub fn print(all: &[MeasurementResults]) {
    let mut rows: Vec<[String; 7]> = vec![HEAD.map(str::to_owned)];
    for measured in all {
        rows.extend(measured.figures.iter().map(|figure| row(measured, figure)));
    }
    let widths: Vec<usize> =
        (0..HEAD.len()).map(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0)).collect();
    for (number, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(c, w)| format!("{c:<w$}")).collect();
        println!("| {} |", cells.join(" | "));
        if number == 0 {
            let rules: Vec<String> = widths.iter().map(|w| "-".repeat(*w)).collect();
            println!("| {} |", rules.join(" | "));
        }
    }
    let failures = all.iter().flat_map(|m| [Some(&m.agent), m.other.as_ref(), m.raw.as_ref()]).flatten();
    for error in failures.filter_map(|r| r.as_ref().err()) {
        println!("\nfailed: {error}");
    }
}

fn row(measured: &MeasurementResults, figure: &Figure) -> [String; 7] {
    let value = |side: &Result<Samples, String>| side.as_ref().ok().and_then(|s| s.reduced(figure));
    let cell = |side: Option<&Result<Samples, String>>| match side {
        None => String::new(),
        Some(Err(_)) => "failed".to_owned(),
        Some(side) => value(side).map_or("-".to_owned(), |v| figure.unit.show(v)),
    };
    let agent = value(&measured.agent);
    let other = measured.other.as_ref().and_then(value);
    let raw = measured.raw.as_ref().and_then(value);
    let ratio = match (agent, other) {
        (Some(a), Some(b)) if b > 0.0 => format!("{:.2}", a / b),
        _ => String::new(),
    };
    let limit = match figure.bar {
        Bar::AtMost(limit) | Bar::AtLeast(limit) => Some(limit),
        Bar::TimesRaw(times) => raw.map(|raw| raw * times),
        Bar::Open => None,
    };
    let bar = match figure.bar {
        Bar::AtMost(limit) => format!("≤ {}", figure.unit.show(limit)),
        Bar::AtLeast(limit) => format!("≥ {}", figure.unit.show(limit)),
        Bar::TimesRaw(times) => format!("≤ {times} × raw"),
        Bar::Open => String::new(),
    };
    let is_least = matches!(figure.bar, Bar::AtLeast(_));
    let verdict = match (agent, limit) {
        (Some(value), Some(limit)) if is_least => {
            if value >= limit {
                "ok"
            } else {
                "under"
            }
        }
        (Some(value), Some(limit)) if value <= limit => "ok",
        (Some(_), Some(_)) => "over",
        _ => "",
    };
    let (agent, other, raw) = (cell(Some(&measured.agent)), cell(measured.other.as_ref()), cell(measured.raw.as_ref()));
    [figure.title.to_owned(), agent, other, ratio, raw, bar, verdict.to_owned()]
}
