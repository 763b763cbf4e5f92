//! Form of the Grafana dashboard, and alert rules checked by promtool.
//!
//! A test without `promtool` reports its name and is skipped.

use std::{collections::HashSet, path::Path, process::Command};

use serde_json::Value;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards")
}

#[test]
fn alerts_fire_where_they_should() {
    for arguments in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"]] {
        match Command::new("promtool").args(arguments).current_dir(folder()).output() {
            Ok(output) => {
                let printed = [output.stdout, output.stderr].concat();
                assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&printed));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                assert!(std::env::var_os("CI").is_none(), "promtool is missing on CI");
                return println!("skipped alerts_fire_where_they_should: promtool is not installed");
            }
            Err(error) => panic!("promtool: {error}"),
        }
    }
}

#[test]
fn the_dashboard_names_no_data_source_and_no_panel_twice() {
    let text = std::fs::read_to_string(folder().join("node-agent.json")).expect("readable");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["uid"], "node-agent");
    let mut seen = HashSet::new();
    for panel in document["panels"].as_array().expect("panels") {
        assert!(seen.insert(panel["id"].to_string()), "two panels {}", panel["id"]);
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
            let expression = target["expr"].as_str().expect("an expression");
            assert!(expression.contains("cluster=\"$cluster\",instance=~\"$instance\""), "{expression}");
        }
    }
}
