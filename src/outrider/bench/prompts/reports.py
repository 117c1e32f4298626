"""Long reports, made of stock paragraphs, each with a question about it.

Each report has its own selection of paragraphs in its own order, so that no two reports begin alike.
"""

from __future__ import annotations

import random

REPORT_TOKENS = 700  # of a prompt with a report, unless another number is asked for
PARAGRAPH_TOKENS = 75  # measured: the mean of PARAGRAPHS with the default model's tokenizer
OTHER_TOKENS = 45  # measured with the same tokenizer: the chat template, the report's number, the question

PARAGRAPHS = (
    "The old mill at the lower weir was measured again this spring. Its wheel turns freely, but two of "
    "the eight oak paddles have split along the grain, and the sluice lets through about a bucket of "
    "water a minute even when it is shut. The joiner from Marlow offers to replace the paddles in June, "
    "provided that the wood is ordered before Easter.",
    "Traffic on the ring road was counted on three weekdays. Between seven and nine in the morning 2,140 "
    "vehicles went north and 860 went south; in the afternoon it was the other way round. Bicycles were "
    "one in eleven. The longest queue, at the railway crossing, held ninety cars and took fourteen "
    "minutes to dissolve.",
    "The orchard behind the school bore more than in any year since it was planted. The pupils picked 410 "
    "kilograms of apples and 95 of pears. A third went to the kitchen, a third was pressed, and the rest "
    "was sold at the gate, which brought in enough to buy a second press and a ladder.",
    "The bridge over the Tarn was inspected by divers. The two middle piers stand on gravel that the "
    "floods of November carried away to a depth of forty centimetres. There is no danger at present, yet "
    "the engineers advise that stones be laid around the piers before the next winter and that lorries "
    "over twelve tonnes take the upper crossing.",
    "A telescope with a mirror of half a metre was given to the observatory by the family of the late "
    "Professor Lindqvist. It needs a new mount and a roof that slides. Until then it stands, well "
    "wrapped, in the cellar beside the clock, and visitors may look at it on the first Sunday of the "
    "month.",
    "The swimming pool used a fifth less gas than last year, chiefly because the cover is now drawn over "
    "the water at night. The showers, on the other hand, used more water, since the new heads were set "
    "wrongly by the supplier. They were corrected in August, and the supplier has paid for the "
    "difference.",
    "The ferry to the islands was late on 31 of 365 days. On nineteen of them fog was the reason, on "
    "eight the engine, on four a strike of the harbour pilots. Passengers were carried free of charge "
    "when the delay was more than two hours, which happened six times and cost the company 3,700 crowns.",
    "Bees were counted in the meadows between the canal and the railway. Fourteen kinds were found, two "
    "of which had not been seen here for thirty years. They depend on late thistles, and the council has "
    "therefore asked the farmers to leave a strip of four metres along the ditches uncut until the middle "
    "of September.",
    "The town's archive has begun to copy its oldest registers, which go back to 1612. The paper is "
    "sound, but the ink fades when it is exposed to light. Two volunteers turn the pages, one takes the "
    "picture and one checks it. They manage forty pages in an afternoon and will be done, if nobody falls "
    "ill, in three years.",
    "The bakery at the corner of Mill Street reports that it sells 600 loaves on a weekday and 950 on a "
    "Saturday. Rye has become more popular than wheat for the first time. The second oven, bought in "
    "March, halves the time that customers wait before eight in the morning, but it also trips the fuse "
    "if the mixer runs beside it.",
    "The night buses were tried for half a year. Line 2 carried eleven passengers a trip on average, line "
    "5 only three. The drivers ask that the stop at the hospital be moved to the main entrance. The trial "
    "goes on with line 2 until the end of the year, and line 5 becomes a taxi that has to be called.",
    "In the botanical garden the great agave is about to bloom, for the first time in its forty years and "
    "for the last. Its stem grows by twelve centimetres a day and has reached the glass. Two panes were "
    "taken out so that it can go on. The gardeners expect the flowers in the second week of July and will "
    "then open until nine in the evening.",
    "The lighthouse keeps its old lens, but the lamp inside it was replaced. The new one uses a tenth of "
    "the power and is seen from nineteen sea miles, one more than before. The keeper's flat stands empty "
    "now; the association of radio amateurs would like to rent it and offers to repair the stairs.",
    "A survey among the 320 households of the hillside showed that 212 heat with wood at least on some "
    "days. Of their stoves one in four is older than thirty years. A new stove would reduce the soot by "
    "nine tenths. The council pays a third of its price to those who apply before October.",
    "The museum of clocks moved its largest piece, an astronomical clock of 1741, from the cellar to the "
    "stair hall. It had to be taken apart into 312 pieces. When it was put together again one wheel was "
    "left over; it turned out to belong to the clock of the town hall, which had been a minute slow since "
    "1958.",
    "The water of the lake was tested at six places. It is clean enough for swimming everywhere but at "
    "the mouth of the brook, where a pipe from the allotments was found to be broken. The pipe was mended "
    "within a week. Since then the sixth place, too, has been within the limits, though barely after "
    "heavy rain.",
    "The new timetable of the mountain railway has seven trains a day instead of five. The first leaves "
    "the valley at 6.40, the last returns at 21.15. A trip takes 38 minutes up and 41 down, since the "
    "brakes need their time. Skis, sledges and dogs travel free of charge; bicycles pay as children do.",
    "The hospital's kitchen asked 180 patients how they liked the food. Soups were praised by most, "
    "vegetables by few, since they come lukewarm. The cause is the lift, in which the trolleys wait for "
    "up to ten minutes at noon. From May on the trolleys have a lift for themselves between half past "
    "eleven and one.",
    "The choir of St Anne's bought an organ with eleven stops from a chapel that was closed. It was "
    "carried down a spiral stair pipe by pipe. The longest pipe, of almost five metres, went through the "
    "window. It sounds a little sharp; the organ builder says that it will settle once the heating has "
    "been on for a winter.",
    "Wolves were seen twice in the northern forest, in January and in March. No sheep were lost, but "
    "three farmers have bought dogs, and one has put up a fence with five wires. The forester has set up "
    "eight cameras. So far they have shown deer, foxes, a lynx and, on most evenings, the forester.",
    "The printing works gave up lead in the spring. The last page that was set by hand, a poem of "
    "fourteen lines, hangs in the corridor. The machines were sold to a museum in Ghent, all but one, on "
    "which the apprentices still print the cards for the new year. It makes a noise that is missed by the "
    "older colleagues.",
    "The harbour was dredged for the first time since 2009. The barges took away 46,000 cubic metres of "
    "mud, two anchors and a piano. Ships of up to seven metres' draught can now enter at low tide. The "
    "mud was spread over the polder, where it has to dry for two years before anything can be sown in it.",
    "The glassworks lowered the heat of its furnace by thirty degrees by adding a pinch of lithium to the "
    "sand. This saves as much gas as two hundred flats need. The glass is a little harder to cut. The "
    "cutters were given better wheels and have since then broken no more pieces than before.",
    "A storm in October threw down 140 trees in the park, most of them poplars near the pond. The trunks "
    "were sold, the branches chopped and strewn on the paths. In their place limes and hornbeams will be "
    "planted, which grow more slowly and stand more firmly. The pond's ducks did not come back until "
    "February.",
)

QUESTIONS = (
    "Which sums of money does the report mention?",
    "What has to be done before the next winter?",
    "Summarise the report in three sentences.",
    "Which of the things reported is the oldest?",
    "Make a list of everything that was counted or measured.",
    "Who benefits from the changes in the report?",
    "What went wrong, and what was its cause?",
    "Give every section a title of two or three words.",
    "Which animals and plants occur in the report?",
    "What should the council decide first, and why?",
    "Explain the report to a child of ten.",
    "Which sections are good news and which are bad news?",
    "Write a short newspaper item about the second section.",
    "Which dates and times does the report give?",
    "What is the last section about?",
    "Write three questions that the report leaves open.",
)


def report(number: int, prompt_tokens: int = REPORT_TOKENS) -> str:
    """The document of prompt `number`, the same on every run. The whole prompt has about `prompt_tokens`."""
    count = max(1, round((prompt_tokens - OTHER_TOKENS) / PARAGRAPH_TOKENS))
    generator = random.Random(number)
    chosen: list[str] = []
    while len(chosen) < count:  # a long report has every paragraph several times, each time in another order
        chosen += generator.sample(PARAGRAPHS, min(count - len(chosen), len(PARAGRAPHS)))
    return "\n\n".join(f"{place}. {text}" for place, text in enumerate(chosen, 1))
