//! Prometheus server and promtool of Debian, for scrape, query, and lint tests.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    process::{PATIENCE, get},
    reservation::free_ports,
};

/// Running Prometheus server; drop kills it.
pub struct Prometheus {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

/// Reports a missing program by printing that the test is skipped; panics on CI and for any other error.
fn is_missing(program: &str, test: &str, error: &std::io::Error) -> bool {
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{program}: {error}");
    assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {program} is not installed");
    println!("skipped: {test}: {program} is not installed");
    true
}

impl Prometheus {
    /// Starts Prometheus with a configuration in a directory; `None` if it is not installed.
    pub async fn start(test: &str, folder: &Path, config: &Value) -> Option<Self> {
        let [port] = free_ports();
        let (file, log) = (folder.join("prometheus.yaml"), folder.join("prometheus.log"));
        fs::write(&file, config.to_string()).expect("written");
        let output = fs::File::create(&log).expect("failed to create the log file");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("failed to duplicate the log file"))
            .stderr(output)
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) if is_missing("prometheus", test, &error) => return None,
            Err(error) => panic!("prometheus: {error}"),
        };
        let started = Self { child, port, log };
        let deadline = Instant::now() + PATIENCE;
        while get(port, "/-/ready").await.is_none_or(|answer| answer.status != 200) {
            assert!(Instant::now() < deadline, "prometheus is not ready\n{}", started.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(started)
    }

    /// Log of Prometheus.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    async fn ask(&self, path: &str) -> Value {
        let answer = get(self.port, path).await.expect("no response from prometheus");
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{path}: {error}: {}", answer.body))
    }

    /// Series that an expression returns now.
    pub async fn series(&self, expression: &str) -> Vec<Value> {
        let query: String = form_urlencoded::Serializer::new(String::new()).append_pair("query", expression).finish();
        let answer = self.ask(&format!("/api/v1/query?{query}")).await;
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().cloned().unwrap_or_default()
    }

    /// Active scrape targets.
    pub async fn targets(&self) -> Vec<Value> {
        let answer = self.ask("/api/v1/targets?state=active").await;
        answer["data"]["activeTargets"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until all expressions return data; panics with those that do not.
    pub async fn all_return<N: Ord + std::fmt::Debug>(&self, expressions: &BTreeMap<N, String>) {
        let deadline = Instant::now() + PATIENCE;
        let mut left: Vec<(&N, &String)> = expressions.iter().collect();
        loop {
            let mut empty = Vec::new();
            for (name, expression) in left {
                if self.series(expression).await.is_empty() {
                    empty.push((name, expression));
                }
            }
            if empty.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "no data for:\n{empty:#?}");
            left = empty;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Lint messages of promtool about a metrics page, one per line; `None` if promtool is not installed.
pub fn lint(test: &str, page: &str) -> Option<Vec<String>> {
    let child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) if is_missing("promtool", test, &error) => return None,
        Err(error) => panic!("promtool: {error}"),
    };
    child.stdin.take().expect("open").write_all(page.as_bytes()).expect("failed to write to promtool");
    let output = child.wait_with_output().expect("failed to wait for promtool");
    let report = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    // 3: the page parses, but promtool objects to some names.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{report}");
    Some(report.lines().map(str::to_owned).collect())
}
