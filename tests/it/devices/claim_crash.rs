//! Crashes of the agent between any two steps of preparing and releasing a claim (spec 06c §3.2-3.5).

use std::{collections::HashSet, fs, path::PathBuf};

use berth_ports::PodClaims;
use berth_resources::dra::checkpoint;
use berth_testkit::dra_driver::V1;

use super::{
    claim_fixture::{ClaimNode, PREPARE, UNPREPARE, calls},
    fixture::RecordedFile,
};

/// Number of claims in a checkpoint.
fn claims_in(content: Option<&Vec<u8>>) -> usize {
    content.map_or(0, |content| checkpoint::decode(content).expect("a valid checkpoint").len())
}

/// The agent may be killed between any two steps. If the pod is still there, its claim is prepared with one call, and
/// its devices are not doubled; if it is not, the claim is released. In the end nothing is left, also at the driver.
#[tokio::test]
async fn a_crash_between_any_two_steps_of_a_claim_leaves_nothing_prepared() {
    // AC-06c-22
    let node = ClaimNode::new(&[V1], &["one"]);
    let file = RecordedFile::containing(None);
    let agent = node.start(file.clone()).await;
    agent.claims.prepare(&node.pod).await.expect("the driver works");
    let [spec]: [PathBuf; 1] = node.specs().try_into().expect("the driver has prepared one claim");
    let spec_text = fs::read(&spec).expect("readable");
    agent.claims.unprepare(node.pod.uid()).await.expect("the driver works");
    agent.stop().await;
    let contents = file.contents();
    let [begun, prepared, released] = contents.as_slice() else {
        panic!("{} writes: expected two by the preparation, and one by the release", contents.len())
    };

    for (when, content, is_prepared) in [
        ("before the first write", None, false),
        ("between the first write and the preparation", Some(begun), false),
        ("between the preparation and its write", Some(begun), true),
        ("after the write of the devices", Some(prepared), true),
        ("between the release by the driver and its write", Some(prepared), false),
        ("after the last write", Some(released), false),
    ] {
        for is_pod_gone in [false, true] {
            if is_prepared {
                fs::write(&spec, &spec_text).expect("written");
            }
            assert_eq!(node.specs().len(), usize::from(is_prepared), "{when}");
            let (prepares, unprepares) = (calls(&node.driver, PREPARE), calls(&node.driver, UNPREPARE));
            let file = RecordedFile::containing(content);
            let agent = node.start(file.clone()).await;
            if is_pod_gone {
                agent.claims.reconcile(&HashSet::new());
            } else {
                // The second time the claim is known to be prepared.
                for _ in 0..2 {
                    agent.claims.prepare(&node.pod).await.expect(when);
                }
                assert_eq!(agent.cdi_devices(&node.pod), Ok(vec![node.cdi_id("one")]), "{when}");
                assert_eq!(node.specs(), [spec.as_path()], "{when}");
                agent.claims.unprepare(node.pod.uid()).await.expect(when);
            }
            file.until(&format!("no claim is left after a crash {when}"), |content| claims_in(content) == 0).await;
            assert_eq!(node.specs(), [] as [PathBuf; 0], "{when}: the driver has released the claim");
            let expected = if is_pod_gone { (0, claims_in(content)) } else { (1, 1) };
            let done = (calls(&node.driver, PREPARE) - prepares, calls(&node.driver, UNPREPARE) - unprepares);
            assert_eq!(done, expected, "{when}: calls to prepare and to release");
            agent.stop().await;
        }
    }
}
