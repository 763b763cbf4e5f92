//! Property test of PLEG generations under any order of actions, exits, latencies, and event faults.
//!
//! An observation of a generation shows every action that completed before it, and all views converge to the runtime's
//! state.

use std::{collections::HashMap, time::Duration};

use berth_cri::RuntimeService;
use berth_ports::{PodObserver, PodView};
use berth_types::observation::Generation;
use proptest::prelude::*;
use tokio::time::sleep;

use crate::pleg::fixture::{Fixture, who};
use berth_testkit::scripted_cri::EventFaults;

#[derive(Clone, Debug)]
enum Step {
    /// Start another container of a pod and report the action.
    Start(usize),
    /// A running container exits by itself.
    Exit(usize),
    /// Remove an exited container without a report.
    Remove(usize),
    /// Time passes, in ms.
    Wait(u64),
    /// All event streams end.
    Break,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3_usize).prop_map(Step::Start),
        4 => (0..3_usize).prop_map(Step::Exit),
        2 => (0..3_usize).prop_map(Step::Remove),
        4 => (0..60_u64).prop_map(Step::Wait),
        1 => Just(Step::Break),
    ];
    proptest::collection::vec(step, 1..40)
}

struct World {
    house: Fixture,
    views: Vec<PodView>,
    sandboxes: Vec<String>,
    /// Per pod: started containers, and the generation from which observations must include them.
    started: Vec<Vec<(String, Generation)>>,
    removed: Vec<String>,
}

impl World {
    async fn new(latency: u64, faults: EventFaults, seed: u64) -> Self {
        let house = Fixture::new();
        house.cri.seed(seed);
        house.cri.event_faults(faults);
        for op in ["list_podsandbox", "list_containers", "container_status", "podsandbox_status"] {
            house.cri.latency(op, Duration::from_millis(latency));
        }
        let mut sandboxes = Vec::new();
        for at in 0..3 {
            sandboxes.push(house.sandbox(&format!("p{at}"), 0).await);
        }
        let views = (0..3).map(|at| house.pleg.view(&who(&format!("p{at}")))).collect();
        Self { house, views, sandboxes, started: vec![Vec::new(); 3], removed: Vec::new() }
    }

    async fn take(&mut self, step: &Step) {
        match *step {
            Step::Start(pod) => {
                let (name, count) = (format!("p{pod}"), self.started[pod].len());
                let made = self.house.container(&self.sandboxes[pod], &name, &format!("c{count}"), 0).await;
                let generation = self.house.pleg.action_completed(&who(&name).uid);
                self.started[pod].push((made, generation));
            }
            Step::Exit(pod) => {
                let running: HashMap<String, i32> =
                    self.house.cri.containers().into_iter().map(|c| (c.id, c.state)).collect();
                let next = self.started[pod].iter().find(|(id, _)| running.get(id) == Some(&1));
                if let Some((id, _)) = next {
                    self.house.cri.kill(id, 1, "");
                }
            }
            Step::Remove(pod) => {
                let exited: Vec<String> =
                    self.house.cri.containers().into_iter().filter(|c| c.state == 2).map(|c| c.id).collect();
                let next = self.started[pod].iter().find(|(id, _)| exited.contains(id));
                if let Some((id, _)) = next {
                    self.removed.push(id.clone());
                    self.house.cri.remove_container(id).await.expect("removed");
                }
            }
            Step::Wait(ms) => sleep(Duration::from_millis(ms)).await,
            Step::Break => self.house.cri.break_streams(),
        }
        self.check();
    }

    /// Rule 4: an observation includes every action that completed before it began.
    fn check(&mut self) {
        for (pod, view) in self.views.iter_mut().enumerate() {
            let Some(seen) = view.latest() else { continue };
            for (id, generation) in &self.started[pod] {
                let is_shown = seen.pod.containers.iter().any(|c| c.id.as_str() == id);
                let is_due = seen.error.is_none() && seen.generation >= *generation && !self.removed.contains(id);
                assert!(is_shown || !is_due, "{id} started before {generation:?} is missing in {seen:?}");
            }
        }
    }

    /// In the end the views show the runtime's containers.
    async fn converge(&mut self) {
        sleep(Duration::from_secs(61)).await;
        let truth: HashMap<String, i32> = self.house.cri.containers().into_iter().map(|c| (c.id, c.state)).collect();
        for (pod, view) in self.views.iter_mut().enumerate() {
            let seen = view.latest().expect("a look");
            assert_eq!(seen.error, None);
            let shown: HashMap<String, i32> =
                seen.pod.containers.iter().map(|c| (c.id.to_string(), c.state as i32)).collect();
            let mine = self.started[pod].iter().filter_map(|(id, _)| Some((id.clone(), *truth.get(id)?))).collect();
            assert_eq!(shown, mine, "pod {pod}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_generation_rule_holds_and_views_converge(
        steps in steps(),
        latency in 0..40_u64,
        (lose, duplicate, reorder) in (0.0..0.5_f64, 0.0..0.5_f64, 0.0..0.5_f64),
        seed in any::<u64>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let mut world = World::new(latency, EventFaults { lose, duplicate, reorder }, seed).await;
            for step in &steps {
                world.take(step).await;
            }
            world.converge().await;
        });
    }
}
