//! `berth why`: diagnostics of one pod: what it waits for, errors, containers, probes, stages.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use serde_json::Value;

use super::{
    OutputFormat, format_document, in_colour,
    node_client::{self, NodeClient, is_not_found},
    pod_lookup::{self, PodArguments},
    print,
};
use crate::{
    cli::table::{Cell, Color, age, line, paint, painted, sanitize, seconds},
    diagnostics::{ContainerDiagnosis, PodDiagnosis, Probe, WaitInfo},
};

/// Maximum characters of a long text; `-o json` has all of it.
const LINE: usize = 200;

/// The pod, and the output format.
#[derive(Args, Debug)]
pub(in crate::cli) struct WhyArguments {
    #[command(flatten)]
    pod: PodArguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Prints the diagnostics of a pod.
pub(in crate::cli) async fn print_diagnostics(wanted: WhyArguments) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let document = fetch_diagnosis(&client, &wanted.pod).await?;
    let colour = in_colour();
    print(format_document(document, wanted.output, |why| screen(&why, Timestamp::now(), colour))?)?;
    Ok(ExitCode::SUCCESS)
}

/// Requests the diagnostics of the pod. A pod that is no longer desired is not listed while it terminates, but is still
/// found by its former name.
async fn fetch_diagnosis(client: &NodeClient, pod: &PodArguments) -> Result<Value> {
    let pods = pod_lookup::pods(client).await?;
    let (first, others, unknown) = match pod.named(&pods) {
        Ok(named) => (named.clone(), pod_lookup::with_node(&named, &pods), None),
        Err(unknown) => {
            let Some(named) = pod.unlisted(&pods) else { return Err(unknown) };
            (named.clone(), pod_lookup::with_node(&named, &pods), Some(unknown))
        }
    };
    let mut refused = unknown;
    for named in std::iter::once(first).chain(others) {
        match client.document::<Value>(&format!("/debug/why/{}", named.path())).await {
            Err(error) if is_not_found(&error) => _ = refused.get_or_insert(error),
            answer => return answer,
        }
    }
    Err(refused.unwrap_or_else(|| anyhow::anyhow!("pod not found")))
}

/// Renders the diagnostics. Pure.
fn screen(why: &PodDiagnosis, now: Timestamp, in_colour: bool) -> String {
    let colour = |colour| Some(colour).filter(|_| in_colour);
    let phase = match why.phase.as_str() {
        "" => "no status yet",
        phase => phase,
    };
    let phase_colour = match phase {
        "Running" | "Succeeded" => Color::Green,
        "Failed" => Color::Red,
        _ => Color::Yellow,
    };
    let source = if why.source.is_empty() { "no source (no longer desired)" } else { &why.source };
    let mut out = format!(
        "{}   {}   {}   {}\n",
        sanitize(&format!("{}/{}", why.namespace, why.name)),
        paint(&sanitize(phase), colour(phase_colour)),
        sanitize(&why.life),
        paint(&sanitize(&format!("{} from {source}", why.uid)), colour(Color::Dim)),
    );
    let reason: Vec<&str> =
        [&why.reason, &why.message].into_iter().map(String::as_str).filter(|t| !t.is_empty()).collect();
    if !reason.is_empty() {
        out.push_str(&format!("Reason     {}\n", sanitize(&line(&reason.join(": "), LINE))));
    }
    if !why.explanation.is_empty() {
        out.push_str(&format!("Details    {}\n", sanitize(&line(&why.explanation, usize::MAX))));
    }
    out.push_str(&format!(
        "Waits for  {}\n",
        why.waits.as_ref().map_or("nothing".to_owned(), |waits| waiting(waits, now))
    ));
    for error in why.errors.iter().rev() {
        let last = error.last.map_or_else(String::new, |last| format!(", {} ago", age(last, now)));
        let row = format!("Error      {} ({}x{last})\n", sanitize(&line(&error.text, usize::MAX)), error.times);
        out.push_str(&paint(row.trim_end(), colour(Color::Red)));
        out.push('\n');
    }
    let sections =
        [containers(&why.containers, now, in_colour), unmet(why), probes(&why.probes, now, in_colour), stages(why)];
    for section in sections.into_iter().filter(|section| !section.is_empty()) {
        out.push('\n');
        out.push_str(&section);
    }
    out
}

fn waiting(waits: &WaitInfo, now: Timestamp) -> String {
    let mut text = sanitize(&waits.stage);
    if waits.since.is_some() {
        text.push_str(&format!(", for {}", seconds(waits.seconds)));
    }
    if let Some(until) = waits.until {
        let left = until.duration_since(now).as_secs_f64().max(0.0);
        text.push_str(&format!(", until {} (in {})", until.strftime("%H:%M:%SZ"), seconds(left)));
    }
    text
}

fn heads(names: &[&str]) -> Vec<Cell> {
    names.iter().map(|name| Cell::from(*name)).collect()
}

fn containers(all: &[ContainerDiagnosis], now: Timestamp, in_colour: bool) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut rows = vec![heads(&["CONTAINER", "STATE", "READY", "RESTARTS", "LAST EXIT", "REASON"])];
    for container in all {
        let colour = match container.state.as_str() {
            "running" if container.ready => Color::Green,
            "terminated" if container.reason == "Completed" => Color::Dim,
            "running" | "waiting" if container.reason != "CrashLoopBackOff" => Color::Yellow,
            _ => Color::Red,
        };
        let exit = container.last_exit.as_ref().map_or_else(String::new, |exit| {
            let at = exit.at.map_or_else(String::new, |at| format!(", {} ago", age(at, now)));
            format!("{} {}{at}", exit.code, exit.reason)
        });
        let reason = [&container.reason, &container.message].map(String::as_str);
        let reason: Vec<&str> = reason.into_iter().filter(|text| !text.is_empty()).collect();
        rows.push(vec![
            container.name.clone().into(),
            Cell::painted(container.state.clone(), Some(colour)),
            if container.ready { "yes" } else { "no" }.into(),
            container.restarts.to_string().into(),
            exit.into(),
            line(&reason.join(": "), LINE).into(),
        ]);
    }
    painted(&rows, in_colour)
}

fn unmet(why: &PodDiagnosis) -> String {
    if why.unmet.is_empty() {
        return String::new();
    }
    let mut rows = vec![heads(&["UNMET CONDITION", "REASON", "MESSAGE"])];
    let of = |condition: &crate::diagnostics::UnmetCondition| {
        [&condition.kind, &condition.reason, &condition.message].map(|text| Cell::from(line(text, LINE))).to_vec()
    };
    rows.extend(why.unmet.iter().map(of));
    painted(&rows, false)
}

fn probes(all: &[Probe], now: Timestamp, in_colour: bool) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut rows = vec![heads(&["PROBE", "CONTAINER", "OUTCOME", "COUNT", "LAST", "OUTPUT"])];
    for probe in all {
        // Latest first: it explains the current state.
        for (at, run) in probe.runs.iter().rev().enumerate() {
            let colour = match run.outcome.as_str() {
                "success" => Color::Green,
                "failure" => Color::Red,
                _ => Color::Yellow,
            };
            let name = |text: String| if at == 0 { text } else { String::new() };
            let before = if probe.previous { " (previous)" } else { "" };
            rows.push(vec![
                name(probe.kind.clone()).into(),
                name(format!("{}{before}", probe.container)).into(),
                Cell::painted(run.outcome.clone(), Some(colour)),
                run.times.to_string().into(),
                run.last.map_or_else(String::new, |last| format!("{} ago", age(last, now))).into(),
                line(&run.text, LINE).into(),
            ]);
        }
    }
    painted(&rows, in_colour)
}

fn stages(why: &PodDiagnosis) -> String {
    if why.stages.is_empty() {
        return String::new();
    }
    let mut rows = vec![heads(&["STAGE", "FIRST", "LAST", "MAX", "COUNT"])];
    let of = |stage: &crate::diagnostics::StageTiming| -> Vec<Cell> {
        vec![
            stage.stage.clone().into(),
            seconds(stage.first_seconds).into(),
            seconds(stage.last_seconds).into(),
            seconds(stage.longest_seconds).into(),
            stage.times.to_string().into(),
        ]
    };
    rows.extend(why.stages.iter().map(of));
    painted(&rows, false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_that_is_known_on_one_screen() {
        let why: PodDiagnosis = serde_json::from_value(json!({
            "namespace": "n", "name": "web", "uid": "u", "source": "file", "phase": "Pending", "life": "sync",
            "waits": {"stage": "back-off", "reason": "back_off", "since": "2026-01-01T00:00:00Z", "seconds": 30.0,
                      "until": "2026-01-01T00:00:40Z"},
            "errors": [{"text": "no\nimage", "times": 2, "last": "2026-01-01T00:00:20Z"}],
            "containers": [{"name": "main", "state": "waiting", "reason": "CrashLoopBackOff", "message": "panic: x\n  at \u{1b}[2Jmain.rs\n",
                "restarts": 3, "lastExit": {"code": 137, "reason": "OOMKilled", "at": "2026-01-01T00:00:00Z"}}],
            "probes": [{"container": "main", "kind": "Readiness", "runs": [
                {"outcome": "success", "times": 9, "last": "2026-01-01T00:00:01Z"},
                {"outcome": "failure", "text": "404", "times": 7, "last": "2026-01-01T00:00:29Z"}]},
                {"container": "main", "kind": "Liveness", "previous": true, "runs": [
                {"outcome": "failure", "text": "500", "times": 3, "last": "2026-01-01T00:00:00Z"}]}],
            "unmet": [{"type": "Ready", "reason": "ContainersNotReady", "message": "m"}],
            "stages": [{"stage": "volumes", "times": 2, "firstSeconds": 1.235, "longestSeconds": 2.0}],
        }))
        .expect("a document");
        let text = screen(&why, "2026-01-01T00:00:30Z".parse().expect("a time"), false);
        let expected = "\
n/web   Pending   sync   u from file
Waits for  back-off, for 30s, until 00:00:40Z (in 10s)
Error      no image (2x, 10s ago)

CONTAINER   STATE     READY   RESTARTS   LAST EXIT                REASON
main        waiting   no      3          137 OOMKilled, 30s ago   CrashLoopBackOff: panic: x at \u{fffd}[2Jmain.rs

UNMET CONDITION   REASON               MESSAGE
Ready             ContainersNotReady   m

PROBE       CONTAINER         OUTCOME   COUNT   LAST      OUTPUT
Readiness   main              failure   7       1s ago    404
                              success   9       29s ago
Liveness    main (previous)   failure   3       30s ago   500

STAGE     FIRST   LAST   MAX    COUNT
volumes   1.2s    0      2.0s   2
";
        assert_eq!(text, expected);
        let refused = PodDiagnosis {
            reason: "TopologyAffinityError".to_owned(),
            explanation: "cpu: available\non nodes 0,1".to_owned(),
            ..PodDiagnosis::default()
        };
        let refused = screen(&refused, Timestamp::UNIX_EPOCH, false);
        let expected = "Reason     TopologyAffinityError\nDetails    cpu: available on nodes 0,1\nWaits for  nothing\n";
        assert!(refused.ends_with(expected), "{refused}");
        let quiet = screen(&PodDiagnosis::default(), Timestamp::UNIX_EPOCH, true);
        assert!(quiet.contains("no status yet") && quiet.ends_with("Waits for  nothing\n"), "{quiet}");
    }
}
